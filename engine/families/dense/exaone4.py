"""EXAONE 4: norms after each half, none before; queries and keys normed by head; layers without a window have no rope."""

from __future__ import annotations

from engine.families.fields import (
    SLIDING,
    Fields,
    attention,
    every,
    gated_mlp,
    layer_types,
    model,
    rope,
    sliding_window,
)
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec

DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
AROUND_MIXER = BranchSpec(after="post_attention_layernorm")
AROUND_MLP = BranchSpec(after="post_feedforward_layernorm")


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(DEFAULTS)
    mlp = gated_mlp(fields)
    return model(
        fields,
        [LayerSpec(mixer=mixer, mlp=mlp, around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP) for mixer in mixers(fields)],
    )


def mixers(fields: Fields) -> list[AttentionSpec]:
    """Each layer's attention."""
    window, pattern = sliding_window(fields), fields.get("sliding_window_pattern")
    rotation = rope(fields)
    return [
        attention(
            fields,
            rope=rotation if kind == SLIDING or not window else None,
            window=window if kind == SLIDING else 0,
            qk_norm=QkNorm(),
        )
        for kind in layer_types(fields, _kinds(fields, pattern if window else 0))
    ]


def _kinds(fields: Fields, pattern: int | str | None) -> list[str]:
    """Old checkpoints write the pattern as letters: "LLLG"."""
    if isinstance(pattern, str):
        return every(fields, len(pattern))
    return every(fields, int(pattern or 0))
