"""Ai2 (Allen Institute for AI): OLMo 1 to 3, OLMoE, FlexOlmo, OLMo hybrid.

From OLMo 2 on norms stand after each half, none before; queries and keys are normed over all heads.
"""

from __future__ import annotations

from engine.families.reading import (
    FULL,
    LINEAR,
    SLIDING,
    Family,
    Fields,
    attention,
    delta,
    every,
    gated_mlp,
    layer_types,
    model,
    rope,
    sliding_window,
    softmax_rule,
    sparse_mlp,
    with_defaults,
)
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.ends import NormSpec
from engine.spec.experts import SparseMlpSpec
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import RopeSpec
from engine.spec.states import DeltaSpec
from engine.weights.names import StoredNames

AROUND_MIXER = BranchSpec(after="post_attention_layernorm")
AROUND_MLP = BranchSpec(after="post_feedforward_layernorm")
# Fields of weight initialisation.
OF_TRAINING = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
OUTPUT_NORM_EPS = 1e-5  # whatever the model's is


def read_olmo(fields: Fields) -> ModelSpec:
    """OLMo 1: LayerNorm without weights; queries, keys and values may be cut off."""
    fields = with_defaults(fields, "olmo")
    fields.only("layer_norm_eps", 1e-5)
    fields.ignore("rms_norm_eps")
    bias, clip = fields.flag("attention_bias"), fields.real("clip_qkv", 0.0)
    layer = LayerSpec(mixer=attention(fields, clip=clip, qkv_bias=bias, output_bias=bias), mlp=gated_mlp(fields))
    layers = [layer] * fields.number("num_hidden_layers")
    return model(fields, layers, eps="layer_norm_eps", norms=NormSpec(kind="layer", has_weight=False))


def read_olmo2(fields: Fields) -> ModelSpec:
    """OLMo 2: norms after both halves; queries and keys normed over all heads."""
    fields = with_defaults(fields, "olmo2")
    fields.only("clip_qkv")
    layer = _layer(fields, _attention(fields, rope(fields)))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_olmo3(fields: Fields) -> ModelSpec:
    """OLMo 3: OLMo 2 with a window on three layers of four."""
    fields = with_defaults(fields, "olmo3")
    fields.only("clip_qkv")
    theta, window = fields.real("rope_theta", 500_000.0), sliding_window(fields)
    nested = any(kind in (fields.get("rope_parameters") or {}) for kind in (FULL, SLIDING))
    full = rope(fields, kind=FULL, theta=theta)
    sliding = rope(fields, kind=SLIDING, theta=theta) if nested else RopeSpec(theta=full.theta)
    kinds = layer_types(fields, every(fields, 4))
    layers = {
        FULL: _layer(fields, _attention(fields, full)),
        SLIDING: _layer(fields, _attention(fields, sliding, window=window)),
    }
    return model(fields, [layers[kind] for kind in kinds])


def _attention(fields: Fields, rotation: RopeSpec, window: int = 0) -> AttentionSpec:
    bias = fields.flag("attention_bias")
    qk_norm = QkNorm(over="all")
    return attention(fields, rope=rotation, window=window, qk_norm=qk_norm, qkv_bias=bias, output_bias=bias)


def _layer(fields: Fields, mixer: AttentionSpec) -> LayerSpec:
    return LayerSpec(mixer=mixer, mlp=gated_mlp(fields), around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP)


def read_olmoe(fields: Fields) -> ModelSpec:
    """OLMoE: queries and keys are normed over all heads; experts in every layer."""
    fields = with_defaults(fields, "olmoe")
    fields.only("clip_qkv")
    layer = LayerSpec(mixer=_attention_of_olmoe(fields, theta=10_000.0), mlp=_experts(fields))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_flex_olmo(fields: Fields) -> ModelSpec:
    """FlexOlmo: OLMoE with OLMo 2's norms, after each half."""
    fields = with_defaults(fields, "flex_olmo")
    mixer = _attention_of_olmoe(fields, theta=500_000.0)
    layer = LayerSpec(mixer=mixer, mlp=_experts(fields), around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP)
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def _attention_of_olmoe(fields: Fields, *, theta: float) -> AttentionSpec:
    bias, rotation = fields.flag("attention_bias"), rope(fields, theta=theta)
    return attention(fields, rope=rotation, qk_norm=QkNorm(over="all"), qkv_bias=bias, output_bias=bias)


def _experts(fields: Fields) -> SparseMlpSpec:
    return sparse_mlp(fields, softmax_rule(fields), size_field="intermediate_size")


def read_olmo_hybrid(fields: Fields) -> ModelSpec:
    """OLMo hybrid: three layers of four keep a state and are normed before, the fourth attends without rope, normed after."""
    fields = _with_sizes(with_defaults(fields, "olmo_hybrid"))
    fields.ignore(*OF_TRAINING)
    num_layers = fields.number("num_hidden_layers")
    kinds = layer_types(fields, _default_kinds(num_layers), known=(FULL, LINEAR))
    if FULL not in kinds:
        raise UnsupportedModelError(f"config.json: layer_types without {FULL} is not supported")
    bias, mlp = fields.flag("attention_bias"), gated_mlp(fields)
    mixer = attention(fields, rope=_rotation(fields), qk_norm=QkNorm(over="all"), qkv_bias=bias, output_bias=bias)
    layers = {
        FULL: LayerSpec(mixer=mixer, mlp=mlp, around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP),
        LINEAR: LayerSpec(mixer=_delta(fields), mlp=mlp),
    }
    return model(fields, [layers[kind] for kind in kinds], stored=_names(num_layers))


def _with_sizes(fields: Fields) -> Fields:
    """Derived sizes of heads."""
    heads = fields.number("num_attention_heads")
    keys = fields.count("linear_num_key_heads") or heads
    key_dim = fields.count("linear_key_head_dim") or int(0.75 * fields.number("hidden_size") / keys)
    return fields.with_values(
        linear_num_key_heads=keys,
        linear_num_value_heads=fields.count("linear_num_value_heads") or heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=fields.count("linear_value_head_dim") or 2 * key_dim,
    )


def _default_kinds(num_layers: int) -> list[str]:
    kinds = [FULL if layer % 4 == 3 else LINEAR for layer in range(num_layers)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def _delta(fields: Fields) -> DeltaSpec:
    most = 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0
    return delta(fields, stored="apart", most_strength=most, norm_eps=OUTPUT_NORM_EPS)


def _rotation(fields: Fields) -> RopeSpec | None:
    """The rope; None if its base is null, which means no positional encoding."""
    values = fields.get("rope_parameters") or fields
    fields.ignore("rope_parameters", "rope_theta")
    return None if "rope_theta" in values and values["rope_theta"] is None else rope(fields)


def _names(num_layers: int) -> StoredNames:
    """Norms around recurrent layers have other names than those around attention."""
    renamed = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    layers = [f"model.layers.{layer}." for layer in range(num_layers)]
    return StoredNames(renamed={f"{at}{theirs}.": f"{at}{ours}." for at in layers for theirs, ours in renamed.items()})


FAMILIES: dict[str, Family] = {
    "OlmoForCausalLM": read_olmo,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "FlexOlmoForCausalLM": read_flex_olmo,
    "OlmoeForCausalLM": read_olmoe,
    "OlmoHybridForCausalLM": read_olmo_hybrid,
}
