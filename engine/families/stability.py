"""Stability AI: StableLM."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, gated_mlp, model, with_defaults
from engine.spec.attention import QkNorm
from engine.spec.ends import NormSpec
from engine.spec.model import BEFORE_MLP, BranchSpec, LayerSpec, ModelSpec

BY_HEAD = QkNorm(over="each", q_name="self_attn.q_layernorm.norms.{}", k_name="self_attn.k_layernorm.norms.{}")


def read_stablelm(fields: Fields) -> ModelSpec:
    """StableLM 3B and 2: LayerNorm, a quarter of each head rotated; heads normed and parallel halves in the 12B."""
    fields = with_defaults(fields, "stablelm")
    normed = BY_HEAD if fields.flag("qk_layernorm") else None
    mixer = attention(fields, qk_norm=normed, qkv_bias=fields.flag("use_qkv_bias"))
    around_mlp = BranchSpec(shares=True) if fields.flag("use_parallel_residual") else BEFORE_MLP
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields), around_mlp=around_mlp)
    layers = [layer] * fields.number("num_hidden_layers")
    return model(fields, layers, eps="layer_norm_eps", norms=NormSpec(kind="layer", has_bias=True))


FAMILIES: dict[str, Family] = {
    "StableLmForCausalLM": read_stablelm,
}
