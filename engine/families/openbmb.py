"""OpenBMB: MiniCPM."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    Family,
    Fields,
    attention,
    count,
    flag,
    gated_mlp,
    mla_attention,
    model,
    number,
    real,
    with_defaults,
)
from engine.spec.attention import AttentionSpec
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.mla import MLASpec
from engine.spec.model import BEFORE_MIXER, BEFORE_MLP, LayerSpec, ModelSpec


def read_minicpm3(fields: Fields) -> ModelSpec:
    """MiniCPM3: latent attention with LongRoPE before a dense MLP; embeddings, residuals and logits are multiplied."""
    fields = with_defaults(fields, "minicpm3")
    hidden = number(fields, "hidden_size")
    value_dim = count(fields, "v_head_dim") or hidden // number(fields, "num_attention_heads")
    return _model(fields, mla_attention(fields, interleaved=False, value_dim=value_dim))


def read_minicpm(fields: Fields) -> ModelSpec:
    """MiniCPM 1, 2 and 4: Llama whose embeddings, residuals and logits are multiplied."""
    fields = with_defaults(fields, "minicpm")
    fields.ignore("mup_denominator")
    fields.only("num_experts", 0)
    return _model(fields, attention(fields, qkv_bias=flag(fields, "attention_bias")))


def _model(fields: Fields, mixer: AttentionSpec | MLASpec) -> ModelSpec:
    hidden, num_layers = number(fields, "hidden_size"), number(fields, "num_hidden_layers")
    share = real(fields, "scale_depth", num_layers**0.5) / num_layers**0.5
    layer = LayerSpec(
        mixer=mixer,
        mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")),
        around_mixer=replace(BEFORE_MIXER, multiplier=share),
        around_mlp=replace(BEFORE_MLP, multiplier=share),
    )
    return model(
        fields,
        [layer] * num_layers,
        embedding=EmbeddingSpec(multiplier=real(fields, "scale_emb", 12.0)),
        head=HeadSpec(multiplier=real(fields, "dim_model_base", float(hidden)) / hidden),
    )


FAMILIES: dict[str, Family] = {
    "MiniCPMForCausalLM": read_minicpm,
    "MiniCPM3ForCausalLM": read_minicpm3,
}
