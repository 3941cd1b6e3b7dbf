# mypy: allow-untyped-calls
"""A tiny random Jina v3 as it is published, and the same with an adapter merged into transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.pooling_models import NORMALIZED, build_word_tokenizer, write_modules

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
INSTRUCTIONS = dict.fromkeys(TASKS, "") | {"retrieval.query": "the ", "retrieval.passage": "a "}
HIDDEN, INNER, LAYERS, RANK, ALPHA = 32, 48, 3, 2, 3
FIELDS: dict[str, Any] = {
    "architectures": ["XLMRobertaLoRA"],
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "bos_token_id": 2,
    "classifier_dropout": None,
    "emb_pooler": None,
    "eos_token_id": 3,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-05,
    "load_trained_adapters": True,
    "lora_adaptations": list(TASKS),
    "lora_alpha": ALPHA,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": RANK,
    "matryoshka_dimensions": [8, 16, 32],
    "max_position_embeddings": 96,
    "model_type": "xlm-roberta",
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": INSTRUCTIONS,
    "torch_dtype": "float32",
    "truncate_dim": None,
    "type_vocab_size": 1,
    "use_cache": True,
    "use_flash_attn": True,
    "use_reentrant": False,
    "vocab_size": 128,
}
MATRICES = {"mixer.Wqkv": (3 * HIDDEN, HIDDEN), "mixer.out_proj": (HIDDEN, HIDDEN), "mlp.fc1": (INNER, HIDDEN)}
MATRICES |= {"mlp.fc2": (HIDDEN, INNER)}
TABLES = {"embeddings.word_embeddings": (128, HIDDEN), "embeddings.token_type_embeddings": (1, HIDDEN)}


def build_jina(folder: Path, **changes: Any) -> Path:
    """Write the checkpoint with its files."""
    generator = torch.Generator().manual_seed(4)
    tensors = dict[str, torch.Tensor]()

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    def adapted(name: str, shape: tuple[int, int], *, is_table: bool, scale: float) -> None:
        outputs, inputs = shape
        pair = [(RANK, inputs), (outputs, RANK)]
        if is_table:
            pair = [(outputs, RANK), (RANK, inputs)]
        under = f"roberta.{name}.parametrizations.weight"
        tensors[f"{under}.original"] = draw(*shape, scale=scale)
        for kind, each in zip("AB", pair, strict=True):
            tensors[f"{under}.0.lora_{kind}"] = draw(len(TASKS), *each, scale=0.3)

    for name, shape in TABLES.items():
        adapted(name, shape, is_table=True, scale=0.5)
    norms = ["emb_ln", *(f"encoder.layers.{at}.norm{one}" for at in range(LAYERS) for one in (1, 2))]
    for name in norms:
        tensors[f"roberta.{name}.weight"] = 1 + draw(HIDDEN, scale=0.3)
        tensors[f"roberta.{name}.bias"] = draw(HIDDEN, scale=0.3)
    for at in range(LAYERS):
        for name, shape in MATRICES.items():
            adapted(f"encoder.layers.{at}.{name}", shape, is_table=False, scale=shape[1] ** -0.5)
            tensors[f"roberta.encoder.layers.{at}.{name}.bias"] = draw(shape[0], scale=0.3)
    adapted("pooler.dense", (HIDDEN, HIDDEN), is_table=False, scale=0.1)
    tensors["roberta.pooler.dense.bias"] = draw(HIDDEN, scale=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**FIELDS, **changes}))
    build_word_tokenizer(folder, longest=96)
    write_modules(folder, NORMALIZED, {"pooling_mode_mean_tokens": True}, HIDDEN)
    return folder


def merged(folder: Path, task: str) -> Any:
    """transformers' JinaEmbeddingsV3Model in float64, with the task's adapter in its matrices; "": none."""
    stored = {
        name.removeprefix("roberta."): each.double() for name, each in load_file(folder / "model.safetensors").items()
    }
    state = dict[str, torch.Tensor]()
    for name, each in stored.items():
        base = name.removesuffix(".parametrizations.weight.original")
        if base != name:
            if task:
                a, b = (stored[f"{base}.parametrizations.weight.0.lora_{kind}"][TASKS.index(task)] for kind in "AB")
                each = each + (a @ b if base in TABLES else b @ a) * (ALPHA / RANK)
            name = f"{base}.weight"
        if "lora_" in name:
            continue
        name = name.replace("emb_ln", "embeddings.LayerNorm").replace("encoder.layers", "layers")
        name = name.replace("norm1", "post_attention_layernorm").replace("norm2", "post_mlp_layernorm")
        name = name.replace("mixer.out_proj", "self_attn.o_proj")
        if "mixer.Wqkv" in name:
            for kind, part in zip("qkv", each.chunk(3), strict=True):
                state[name.replace("mixer.Wqkv", f"self_attn.{kind}_proj")] = part
        else:
            state[name] = each
    config = transformers.JinaEmbeddingsV3Config(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=96,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        attn_implementation="eager",
    )
    model = transformers.JinaEmbeddingsV3Model(config).double().eval()
    model.load_state_dict(state)
    return model
