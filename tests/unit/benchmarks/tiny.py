"""Shapes whose weights are drawn, with few and small layers."""

from __future__ import annotations

import pytest

from benchmarks.weights.drawn import DRAWN

TINY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY_EXPERTS = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
TINY_STATES = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY_LATENTS = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def tiny(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Make a shape small, with all that it has."""
    fields = DRAWN[shape]
    small = TINY | {name: size for name, size in (TINY_EXPERTS | TINY_STATES | TINY_LATENTS).items() if name in fields}
    small["num_hidden_layers"] = 4 if "linear_num_key_heads" in fields else 2
    if "sliding_window_pattern" in fields:
        small["sliding_window_pattern"] = 2
    monkeypatch.setitem(DRAWN, shape, fields | small)
