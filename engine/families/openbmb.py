"""OpenBMB: MiniCPM."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import Family, Fields, attention, gated_mlp, mla_attention, model, with_defaults
from engine.spec.attention import AttentionSpec
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.mla import MLASpec
from engine.spec.model import BEFORE_MIXER, BEFORE_MLP, LayerSpec, ModelSpec


def read_minicpm3(fields: Fields) -> ModelSpec:
    """MiniCPM3: latent attention with LongRoPE before a dense MLP; embeddings, residuals and logits are multiplied."""
    fields = with_defaults(fields, "minicpm3")
    hidden = fields.number("hidden_size")
    value_dim = fields.count("v_head_dim") or hidden // fields.number("num_attention_heads")
    return _model(fields, mla_attention(fields, interleaved=False, value_dim=value_dim))


def read_minicpm(fields: Fields) -> ModelSpec:
    """MiniCPM 1, 2 and 4: Llama whose embeddings, residuals and logits are multiplied."""
    fields = with_defaults(fields, "minicpm")
    fields.ignore("mup_denominator")
    fields.only("num_experts", 0)
    return _model(fields, attention(fields, qkv_bias=fields.flag("attention_bias")))


def _model(fields: Fields, mixer: AttentionSpec | MLASpec) -> ModelSpec:
    hidden, num_layers = fields.number("hidden_size"), fields.number("num_hidden_layers")
    share = fields.real("scale_depth", num_layers**0.5) / num_layers**0.5
    layer = LayerSpec(
        mixer=mixer,
        mlp=gated_mlp(fields, bias=fields.flag("mlp_bias")),
        around_mixer=replace(BEFORE_MIXER, multiplier=share),
        around_mlp=replace(BEFORE_MLP, multiplier=share),
    )
    return model(
        fields,
        [layer] * num_layers,
        embedding=EmbeddingSpec(multiplier=fields.real("scale_emb", 12.0)),
        head=HeadSpec(multiplier=fields.real("dim_model_base", float(hidden)) / hidden),
    )


FAMILIES: dict[str, Family] = {
    "MiniCPMForCausalLM": read_minicpm,
    "MiniCPM3ForCausalLM": read_minicpm3,
}
