"""Command R: attention and MLP read the same LayerNorm and add up; pairs are interleaved.

Of Command R7B and A, three layers of four have a window, and the fourth has no rope.
"""

from __future__ import annotations

from engine.families.fields import (
    SLIDING,
    Fields,
    attention,
    count,
    every,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    rope,
    sliding_window,
)
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec

COHERE = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
COHERE_2 = COHERE | {"sliding_window": 4096, "rope_theta": 10_000.0}
SHARED = BranchSpec(shares=True)


def read(fields: Fields) -> ModelSpec:
    """Command R and R+: parallel halves, LayerNorm, interleaved pairs."""
    fields = fields.over(COHERE)
    normed = QkNorm(over="each") if flag(fields, "use_qk_norm") else None
    layer = _layer(fields, attention_of(fields, qk_norm=normed))
    return _model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_2(fields: Fields) -> ModelSpec:
    """Command R7B, Command A: windows on three layers of four, no rope on the fourth."""
    fields = fields.over(COHERE_2)
    fields.only("use_qk_norm", False)
    fields.only("order_of_interleaved_layers", "local_attn_first")
    fields.only("position_embedding_type", "rope_gptj")
    fields.only("rotary_pct", 1.0)
    fields.only("use_parallel_block", True)
    fields.only("use_parallel_embedding", False, True)
    fields.only("use_gated_activation", True)
    window, period = sliding_window(fields), count(fields, "sliding_window_pattern") or 4
    fields.only("layer_switch", period)
    fields.only("use_embedding_sharing", flag(fields, "tie_word_embeddings"))
    sliding, full = attention_of(fields, window=window), attention_of(fields, has_rope=not window)
    kinds = layer_types(fields, every(fields, period))
    return _model(fields, [_layer(fields, sliding if kind == SLIDING else full) for kind in kinds])


def attention_of(
    fields: Fields, *, window: int = 0, has_rope: bool = True, qk_norm: QkNorm | None = None
) -> AttentionSpec:
    bias, rotation = flag(fields, "attention_bias"), rope(fields, interleaved=True)
    rotation_here = rotation if has_rope else None
    return attention(fields, rope=rotation_here, window=window, qk_norm=qk_norm, qkv_bias=bias, output_bias=bias)


def _layer(fields: Fields, mixer: AttentionSpec) -> LayerSpec:
    return LayerSpec(mixer=mixer, mlp=gated_mlp(fields), around_mlp=SHARED)


def _model(fields: Fields, layers: list[LayerSpec]) -> ModelSpec:
    scale = real(fields, "logit_scale", 0.0625)
    return model(fields, layers, eps="layer_norm_eps", norm="layer", logits_multiplier=scale)
