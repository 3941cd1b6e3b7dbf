"""Common readers of multi-head latent attention (MLA)."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.families.reading.fields import Fields
from engine.families.reading.ropes import rope, rope_values
from engine.spec.mla import MLASizes, MLASpec


def mla_attention(fields: Fields, *, interleaved: bool, value_dim: int) -> MLASpec:
    """Read MLA with rotated parts of heads."""
    plain = without_rope(fields, value_dim=value_dim)
    return replace(plain, rope=rope(fields, interleaved=interleaved), scale=plain.scale * magnitude(fields) ** 2)


def without_rope(fields: Fields, *, value_dim: int) -> MLASpec:
    """Read MLA without rope; derived sizes are skipped."""
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    own, shared = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    return MLASpec(
        sizes=MLASizes(
            num_heads=fields.number("num_attention_heads"),
            rank=fields.number("kv_lora_rank"),
            query_rank=fields.count("q_lora_rank"),
            plain=own,
            rotated=shared,
            value=value_dim,
        ),
        rope=None,
        bias=fields.flag("attention_bias"),
        scale=(own + shared) ** -0.5,
    )


def magnitude(fields: Fields) -> float:
    """Return YaRN's attention scale (mscale) beside cosines and sines."""
    _, values = rope_values(fields)
    factor, scale = values.get("factor") or 1.0, values.get("mscale_all_dim") or 0.0
    if (values.get("rope_type") or values.get("type") or "default") == "default" or factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0 if scale else 1.0
