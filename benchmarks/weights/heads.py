"""Draft heads of real shapes with random weights, beside a model of the same sizes: for speed, not for sense."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.weights.checkpoint import STD

NUM_DRAFTS: Mapping[str, int] = {"eagle3": 3, "dflash": 7}  # by kind of head
DFLASH_LAYERS, DFLASH_AUX = 5, 5
EAGLE3_VOCABULARY = 32_000
LEAST_LAYERS = 7  # of a model with the three that an EAGLE-3 head reads if it does not say which
_TAKEN = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def has_layers(model: Path) -> bool:
    """True if the model has the layers that heads read."""
    count: int = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return count >= LEAST_LAYERS


def kept_head(folder: Path, kind: str, model: Path) -> Path:
    """A head of this kind for the model, in bfloat16, written into `folder` unless an earlier run did."""
    target = folder / f"{model.name}-{kind}"
    if (target / "written").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = _config(kind, json.loads((model / "config.json").read_text()))
    noise = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": _drawn(shape, noise) for name, shape in _shapes(kind, config).items()}
    if kind == "eagle3":
        tensors["d2t"] = torch.zeros(config["draft_vocab_size"], dtype=torch.int64)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    (target / "written").touch()
    return target


def draft_bytes(folder: Path, kind: str) -> int:
    """Bytes of weights that one sequence's draft reads, the model's LM head included where the head has none."""
    config = json.loads((folder / "config.json").read_text())
    shapes = _shapes(kind, config)
    inputs = shapes.pop("fc")
    steps = 1 if kind == "dflash" else NUM_DRAFTS[kind]
    elements = steps * sum(map(math.prod, shapes.values()))
    return 2 * (elements + (inputs[0] * config["vocab_size"] if "lm_head" not in shapes else 0))


def _config(kind: str, model: dict[str, Any]) -> dict[str, Any]:
    config = {name: model[name] for name in _TAKEN} | {
        "head_dim": model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"],
        "rope_theta": 10_000.0,
        "torch_dtype": "bfloat16",
    }
    if kind == "eagle3":
        vocabulary = min(EAGLE3_VOCABULARY, model["vocab_size"])
        named = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
        return config | named | {"draft_vocab_size": vocabulary}
    last = model["num_hidden_layers"] - 4
    layers = [1 + number * (last - 1) // (DFLASH_AUX - 1) for number in range(DFLASH_AUX)]
    return config | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DFLASH_LAYERS,
        "block_size": NUM_DRAFTS[kind] + 1,
        "dflash_config": {"mask_token_id": model["vocab_size"] - 1, "target_layer_ids": layers},
    }


def _shapes(kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, head = config["hidden_size"], config["head_dim"]
    found: dict[str, tuple[int, ...]] = {"norm": (size,)}
    if kind == "eagle3":
        found |= {"fc": (size, 3 * size), "lm_head": (config["draft_vocab_size"], size)}
        found |= _layer("midlayer", config, inputs=2 * size) | {"midlayer.hidden_norm": (size,)}
        return found
    found |= {"fc": (size, DFLASH_AUX * size), "hidden_norm": (size,)}
    for number in range(DFLASH_LAYERS):
        under = f"layers.{number}"
        found |= _layer(under, config, inputs=size)
        found |= {f"{under}.self_attn.{name}_norm": (head,) for name in "qk"}
    return found


def _layer(under: str, config: dict[str, Any], *, inputs: int) -> dict[str, tuple[int, ...]]:
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (head * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    shapes = {
        "input_layernorm": (size,),
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (size, queries),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    return {f"{under}.{name}": shape for name, shape in shapes.items()}


def _drawn(shape: tuple[int, ...], noise: torch.Generator) -> torch.Tensor:
    """Ones for a norm, else normal numbers."""
    values = torch.ones(shape, dtype=torch.bfloat16)
    return values if len(shape) == 1 else values.normal_(0.0, STD, generator=noise)
