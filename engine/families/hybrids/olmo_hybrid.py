"""OLMo hybrid: three layers of four keep a state and are normed before, the fourth has attention without rope, normed after."""

from __future__ import annotations

from engine.families.dense.olmo import AROUND_MIXER, AROUND_MLP
from engine.families.fields import (
    FULL,
    Fields,
    attention,
    count,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    rope,
)
from engine.families.hybrids.fields import LINEAR, delta
from engine.spec.attention import QkNorm
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import RopeSpec
from engine.spec.states import DeltaSpec
from engine.weights.names import StoredNames

OLMO_HYBRID = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
# How weights were drawn.
OF_TRAINING = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
OUTPUT_NORM_EPS = 1e-5  # whatever the model's is


def read(fields: Fields) -> ModelSpec:
    fields = _with_sizes(fields.over(OLMO_HYBRID))
    fields.ignore(*OF_TRAINING)
    num_layers = number(fields, "num_hidden_layers")
    kinds = layer_types(fields, _default_kinds(num_layers), known=(FULL, LINEAR))
    if FULL not in kinds:
        raise UnsupportedModelError(f"config.json: layer_types without {FULL} is not supported")
    bias, mlp = flag(fields, "attention_bias"), gated_mlp(fields)
    mixer = attention(fields, rope=_rotation(fields), qk_norm=QkNorm(over="all"), qkv_bias=bias, output_bias=bias)
    layers = {
        FULL: LayerSpec(mixer=mixer, mlp=mlp, around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP),
        LINEAR: LayerSpec(mixer=_delta(fields), mlp=mlp),
    }
    return model(fields, [layers[kind] for kind in kinds], stored=_names(num_layers))


def _with_sizes(fields: Fields) -> Fields:
    """The heads that follow from others."""
    heads = number(fields, "num_attention_heads")
    keys = count(fields, "linear_num_key_heads") or heads
    key_dim = count(fields, "linear_key_head_dim") or int(0.75 * number(fields, "hidden_size") / keys)
    return fields.with_values(
        linear_num_key_heads=keys,
        linear_num_value_heads=count(fields, "linear_num_value_heads") or heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=count(fields, "linear_value_head_dim") or 2 * key_dim,
    )


def _default_kinds(num_layers: int) -> list[str]:
    kinds = [FULL if layer % 4 == 3 else LINEAR for layer in range(num_layers)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def _delta(fields: Fields) -> DeltaSpec:
    most = 2.0 if flag(fields, "linear_allow_neg_eigval") else 1.0
    return delta(fields, stored="apart", most_strength=most, norm_eps=OUTPUT_NORM_EPS)


def _rotation(fields: Fields) -> RopeSpec | None:
    """None where the base of the rotation is written as null, which is how positions are left out."""
    values = fields.get("rope_parameters") or fields
    fields.ignore("rope_parameters", "rope_theta")
    return None if "rope_theta" in values and values["rope_theta"] is None else rope(fields)


def _names(num_layers: int) -> StoredNames:
    """Norms around states have other names than those around attention."""
    renamed = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    layers = [f"model.layers.{layer}." for layer in range(num_layers)]
    return StoredNames(renamed={f"{at}{theirs}.": f"{at}{ours}." for at in layers for theirs, ours in renamed.items()})
