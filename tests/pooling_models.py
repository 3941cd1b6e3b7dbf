# mypy: allow-untyped-calls
"""Tiny random models of vectors and scores, one for each family, with a tokenizer and sentence-transformers' files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = (
    "a",
    "e",
    "i",
    "the",
    "cat",
    "dog",
    "sat",
    "mat",
    "on",
    "hello",
    "world",
    "paris",
    "is",
    "capital",
    "of",
    "france",
)
VOCAB = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *WORDS,
    *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
)
VOCAB += tuple("abcdefghijklmnopqrstuvwxyz.,!?0123456789"[1:])
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
# transformers' class -> its configuration class and the fields that differ.
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "BertModel": ("BertConfig", {"type_vocab_size": 2}),
    "RobertaModel": ("RobertaConfig", {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}),
    "XLMRobertaModel": ("XLMRobertaConfig", {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}),
    "MPNetModel": ("MPNetConfig", {"layer_norm_eps": 1e-5, "pad_token_id": 1}),
    "ModernBertModel": ("ModernBertConfig", {"local_attention": 16, "bos_token_id": 2, "eos_token_id": 3}),
    "NomicBertModel": ("NomicBertConfig", {"type_vocab_size": 2}),
    "EuroBertModel": ("EuroBertConfig", {"num_key_value_heads": 2}),
    "Gemma3TextModel": (
        "Gemma3TextConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "use_bidirectional_attention": True,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Qwen3Model": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "Qwen2Model": ("Qwen2Config", {"num_key_value_heads": 2}),
    "MistralModel": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 24}),
    "LlamaModel": ("LlamaConfig", {"num_key_value_heads": 4}),
}
NORMALIZED = ("Pooling", "Normalize")


def build_pooling_model(
    folder: Path,
    family: str = "BertModel",
    *,
    modules: Sequence[str] = NORMALIZED,
    pooling: Mapping[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a random float32 checkpoint of a class, its tokenizer, and modules behind it; return `folder`."""
    config_class, fields = FAMILIES[re.sub("For(SequenceClassification|CausalLM)$", "Model", family)]
    config = getattr(transformers, config_class)(**{**SHAPE, **fields, **changes})
    config.dtype = torch.float32
    model = getattr(transformers, family)(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    build_word_tokenizer(folder, longest=config.max_position_embeddings)
    if modules and not family.endswith(("ForSequenceClassification", "ForCausalLM")):
        write_modules(folder, modules, pooling or {"pooling_mode_mean_tokens": True}, config.hidden_size)
    return folder


def write_modules(folder: Path, modules: Sequence[str], pooling: Mapping[str, Any], hidden: int) -> None:
    """The files of sentence-transformers. `Dense` makes 24 features, of 24 or without pooling by its matrix alone."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for at, kind in enumerate(modules, 1):
        place = f"{at}_{kind}"
        listed.append({"idx": at, "name": str(at), "path": place, "type": f"sentence_transformers.models.{kind}"})
        (folder / place).mkdir(exist_ok=True)
        if kind == "Pooling":
            _write(folder / place / "config.json", {"word_embedding_dimension": hidden, **pooling})
        elif kind == "Dense":
            size, hidden = hidden, 24
            is_plain = size == 24 or "Pooling" not in modules
            generator = torch.Generator().manual_seed(6 + at)
            tensors = {"linear.weight": torch.randn(24, size, generator=generator)}
            tensors |= {} if is_plain else {"linear.bias": torch.randn(24, generator=generator)}
            save_file(tensors, folder / place / "model.safetensors")
            made = {
                "in_features": size,
                "out_features": 24,
                "bias": not is_plain,
                "activation_function": f"torch.nn.modules.{'linear.Identity' if is_plain else 'activation.Tanh'}",
            }
            _write(folder / place / "config.json", made)
    _write(folder / "modules.json", listed)


def build_word_tokenizer(folder: Path, *, longest: int) -> None:
    """BERT's kind of tokenizer, with [CLS] before a text and [SEP] behind each."""
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"model_max_length": longest, "tokenizer_class": "BertTokenizer"})


CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<extra_0>")


def build_byte_tokenizer(folder: Path, *, longest: int) -> None:
    """Qwen's kind of tokenizer: bytes, "no" and "yes" as words, and its control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: at for at, piece in enumerate([*alphabet, "no", "ye", "yes"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("n", "o"), ("y", "e"), ("ye", "s")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special="think" not in text, normalized=False) for text in CONTROLS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"model_max_length": longest, "tokenizer_class": "Qwen2Tokenizer"})


def build_scoring_model(folder: Path, family: str, **changes: Any) -> Path:
    """A random decoder that scores, with a byte tokenizer."""
    sizes = {"vocab_size": 272, "max_position_embeddings": 1024}
    build_pooling_model(folder, family, modules=(), **{**sizes, **changes})
    build_byte_tokenizer(folder, longest=1024)
    return folder


def write_logit_score(folder: Path, *, good: int, bad: int | None) -> None:
    """sentence-transformers' files of a decoder whose score is a word's logit, or the difference of two."""
    _write(folder / "modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ])  # fmt: skip
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    _write(folder / "1_LogitScore" / "config.json", {"true_token_id": good, "false_token_id": bad})


def write_reward_head(folder: Path, kind: str, *, labels: int, seed: int = 5) -> torch.nn.Sequential:
    """Make a decoder's folder one of Qwen's reward models; return the head, in float64."""
    config = json.loads((folder / "config.json").read_bytes())
    hidden = config["hidden_size"]
    head = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, labels))
    randomise(head, seed)
    stored = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(
        stored | {f"score.{name}": tensor for name, tensor in head.state_dict().items()}, folder / "model.safetensors"
    )
    names = {str(at): f"LABEL_{at}" for at in range(labels)}
    _write(folder / "config.json", {**config, "architectures": [f"Qwen2{kind}"], "id2label": names})
    return head.double()


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw weights so that every tensor matters: what is far from a norm's 1 and a bias's 0 shows a forgotten one."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise * (0.5 if "embeddings" in name else 1 / tensor.shape[-1] ** 0.5))
        else:
            tensor.add_(0.3 * noise)
