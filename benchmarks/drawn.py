"""Models whose weights are drawn on the device, because their checkpoints would not fit on its disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.parameters import Weights

STD = 0.02
EMBEDDING = "model.embed_tokens.weight"
DRAWN: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 200_002,
    },
}


def write_config(folder: Path, shape: str) -> None:
    """Write the config.json of a shape of `DRAWN`, and a file with no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DRAWN[shape], indent=2))
    save_file({}, folder / "model.safetensors")


def draw_weights(weights: Weights, folder: Path) -> None:
    """Fill all parameters: normal with standard deviation 0.02, norms with 1. Takes the place of `load_weights`.

    The embedding's is 1: beside it the layers add little, so tokens stay unlike each other and choose all experts evenly.
    """
    generator = torch.Generator(device=weights.device).manual_seed(0)
    for ways in weights.ways:
        for name in sorted(ways[-1]):  # the way with the fewest tensors
            places = weights.destinations[name]
            for place in places if places[0].slot else places[:1]:
                tensor = place.tensor if place.slot is None else place.slot.real(place.tensor)
                if name.endswith("norm.weight"):
                    tensor.fill_(1.0)
                else:
                    tensor.normal_(0.0, 1.0 if name == EMBEDDING else STD, generator=generator)
                if place.slot is not None:
                    place.slot.arrived(tensor.numel())  # quantised now, and freed
