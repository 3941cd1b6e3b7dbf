# mypy: allow-untyped-calls
"""Tiny random checkpoints in Hugging Face's format, one for each family, with a tokenizer of their own.

Weights are drawn so that greedy decoding wanders instead of repeating one token, and so that no two tensors of a shape
are alike: a swapped or forgotten weight shows up in the text.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2  # <|im_end|>
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Hermes' tools and Qwen's reasoning, as models have them that know both.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CALL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = (
    CALL_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_FAMILIES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 24}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 32, "num_hidden_layers": 3, "mlp_only_layers": [1], **_EXPERTS, "norm_topk_prob": True},
    ),
}
FAMILIES = tuple(_FAMILIES)


def build_tiny_model(folder: Path, family: str, *, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    """Write a random float32 checkpoint of `family` (one of `FAMILIES`) and its tokenizer into `folder`; return `folder`.

    `shards` > 1 writes several safetensors files with an index; `changes` are fields of its config.json. The same arguments
    always give the same weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind, fields = _FAMILIES[family]
    config = kind(**(_SHAPE | fields | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    _randomise(model, seed)
    _save_weights(folder, model, shards)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}))
    build_tokenizer(folder)
    return folder


def build_tokenizer(folder: Path, *, template: str = CHAT_TEMPLATE, added: tuple[str, ...] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json: a byte-level BPE of `VOCAB_SIZE` tokens with a ChatML template.

    `added` are tokens for markup that is no control token, as Qwen's `<tool_call>`.
    """
    (folder / "tokenizer.json").write_text(_trained(tuple(added)), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _SHAPE["max_position_embeddings"],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


@functools.cache
def _trained(added: tuple[str, ...]) -> str:
    """Return a tokenizer.json. Hundreds of checkpoints have the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return str(tokenizer.to_str(pretty=True))


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in (*model.named_parameters(), *_kept_buffers(model)):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("embed_tokens.weight"):
            parameter.copy_(0.2 * noise)  # small beside what the layers add: tied models would echo their input
        elif parameter.dim() >= 2:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(0.5 * noise)


def _save_weights(folder: Path, model: torch.nn.Module, shards: int) -> None:
    tensors = (*model.named_parameters(), *_kept_buffers(model))
    weights = {name: tensor.detach().contiguous() for name, tensor in tensors}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: weights[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    index = {
        "metadata": {"total_size": sum(4 * weight.numel() for weight in weights.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _kept_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that checkpoints hold, such as the corrections of experts' scores."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]


_CORPUS = """\
A large language model reads a prompt and writes an answer, one token at a time. The prompt is read in one pass: every
position attends to the positions before it, and the keys and values of all of them are kept. After that each new token
needs only one more position. Reading is limited by arithmetic, writing by memory; so two kinds of workers share the work.
The runner who finished the first leg hands the baton to the next one without slowing down. Nobody drops it, and nobody
runs with two. The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. How vexingly quick
daft zebras jump! What is the capital of France? The capital of France is Paris. Write a short story about the sea.
Once upon a time there was a little boat that wanted to see the whole wide world, from the harbour to the open ocean.
def main() -> None:
    for number in range(10):
        print(number, "squared is", number * number)
    return None
Zuerst wird die Eingabe gelesen, danach wird die Antwort geschrieben. Müller, Größe, Straße, Übung, Äpfel, schön.
Première étape : lire la question ; deuxième étape : écrire la réponse. Voilà, c'est déjà terminé, à bientôt !
{"model": "tiny", "messages": [{"role": "user", "content": "Hello, how are you today?"}], "stream": true}
0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2024 2025 2026 3.14159 2.71828
You are a helpful assistant. The user asks a question and the assistant answers it in the same language as the user.
user assistant system tool function content message response request temperature sampling probability distribution
"""
