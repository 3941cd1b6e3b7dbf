"""Xiaomi: MiMo and MiMo-V2-Flash."""

from __future__ import annotations

from collections.abc import Mapping

from engine.families.qwen import read_qwen2
from engine.families.reading import (
    CORRECTED,
    FULL,
    SLIDING,
    Family,
    Fields,
    attention,
    gated_mlp,
    layer_types,
    model,
    rope,
    sigmoid_rule,
    sparse_mlp,
    with_defaults,
)
from engine.spec.attention import AttentionSpec, ValueSpec
from engine.spec.model import LayerSpec, MlpSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import RopeSpec
from engine.weights.names import StoredNames

DENSE, SPARSE = "dense", "sparse"
ROTATED_SHARE = 0.334
NAMES = StoredNames(ignored=("model.mtp.",))  # layers that predict further tokens


def read_mimo(fields: Fields) -> ModelSpec:
    """MiMo 7B (Xiaomi): Qwen2, and layers for further tokens that are not computed."""
    fields.ignore("num_nextn_predict_layers")
    return read_qwen2(fields).with_names(StoredNames(ignored=("model.mtp_layers.",)))


def read_mimo_v2(fields: Fields) -> ModelSpec:
    """MiMo-V2-Flash: windows with sinks and more keys, values smaller than keys; corrected sigmoids behind dense layers."""
    eps = "rms_norm_eps" if fields.get("rms_norm_eps") else "layernorm_epsilon"
    fields = with_defaults(fields.over({eps: 1e-5}), "mimo_v2_flash")
    fields.only("layernorm_epsilon", fields.get(eps))
    for name in ("mlp_bias", "use_qk_norm"):
        fields.only(name, False)
    fields.only("n_shared_experts", 0)
    fields.only("hybrid_block_size")
    mlps: dict[str, MlpSpec] = {
        DENSE: gated_mlp(fields),
        SPARSE: sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED),
    }
    ropes = _ropes(fields)
    mixers = {kind: _attention(fields, ropes[kind], slides=kind == SLIDING) for kind in ropes}
    layers = [
        LayerSpec(mixer=mixers[kind], mlp=mlps[mlp])
        for kind, mlp in zip(_kinds(fields), _mlp_kinds(fields), strict=True)
    ]
    return model(fields, layers, eps=eps, stored=NAMES)


def _attention(fields: Fields, rotation: RopeSpec, *, slides: bool) -> AttentionSpec:
    """The attention of a layer: sliding-window layers have twice the KV heads, and sinks."""
    heads, head_dim, value_dim = (fields.number(name) for name in ("num_attention_heads", "head_dim", "v_head_dim"))
    if value_dim > head_dim:
        raise UnsupportedModelError(f"config.json: v_head_dim = {value_dim} is above head_dim = {head_dim}")
    for name, value in {"num_attention_heads": heads, "head_dim": head_dim, "v_head_dim": value_dim}.items():
        fields.only(f"swa_{name}", value)
    window = fields.number("sliding_window")
    fields.only("sliding_window_size", window)
    fields.only("attention_chunk_size", window)
    num_kv_heads = fields.number("num_key_value_heads")
    of_windows = fields.count("swa_num_key_value_heads") or 2 * num_kv_heads
    sinks = {True: fields.flag("add_swa_attention_sink_bias"), False: fields.flag("add_full_attention_sink_bias")}
    num_kv_heads = of_windows if slides else num_kv_heads
    if heads % num_kv_heads:
        raise UnsupportedModelError(f"config.json: num_attention_heads = {heads} with {num_kv_heads} heads of keys")
    return attention(
        fields,
        rope=rotation,
        num_kv_heads=num_kv_heads,
        window=window if slides else 0,
        qkv_bias=fields.flag("attention_bias"),
        sinks=sinks[slides],
        values=ValueSpec(
            features=0 if value_dim == head_dim else value_dim, scale=fields.real("attention_value_scale", 1.0)
        ),
    )


def _ropes(fields: Fields) -> dict[str, RopeSpec]:
    """The ropes, in transformers' form or the published one."""
    values = fields.get("rope_parameters")
    if isinstance(values, Mapping) and FULL in values and SLIDING in values:
        return {kind: rope(fields, kind=kind) for kind in (FULL, SLIDING)}
    fields.only("rope_parameters")
    fields.only("rope_scaling")
    share = fields.real("partial_rotary_factor", ROTATED_SHARE)
    thetas = {FULL: fields.real("rope_theta", 5_000_000.0), SLIDING: fields.real("swa_rope_theta", 10_000.0)}
    if not 0 < share <= 1 or min(thetas.values()) <= 0:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor = {share} of heads rotated by {thetas}")
    return {kind: RopeSpec(theta=theta, share=share) for kind, theta in thetas.items()}


def _kinds(fields: Fields) -> list[str]:
    """Kinds of layers; published configs have 1 for a sliding window."""
    pattern = fields.get("hybrid_layer_pattern")
    if pattern is None:
        pattern = [int(at > 0 and (at + 1) % 6 > 0) for at in range(fields.number("num_hidden_layers"))]
    return layer_types(fields, [_one_of((FULL, SLIDING), each, "hybrid_layer_pattern") for each in pattern])


def _mlp_kinds(fields: Fields) -> list[str]:
    num_layers, published = fields.number("num_hidden_layers"), fields.get("moe_layer_freq")
    if published is not None:
        default = [_one_of((DENSE, SPARSE), each, "moe_layer_freq") for each in published]
    else:
        default = [DENSE] + [SPARSE] * (num_layers - 1)
    kinds = list(fields.get("mlp_layer_types") or default)
    if set(kinds) - {DENSE, SPARSE} or len(kinds) != num_layers:
        raise UnsupportedModelError(f"config.json: the MLPs of {num_layers} layers are {kinds!r:.80}: not supported")
    return kinds


def _one_of(names: tuple[str, str], chosen: object, field: str) -> str:
    if chosen not in (0, 1):
        raise UnsupportedModelError(f"config.json: {field} has {chosen!r:.40}, which is neither 0 nor 1")
    return names[int(chosen == 1)]


FAMILIES: dict[str, Family] = {
    "MiMoForCausalLM": read_mimo,
    "MiMoV2FlashForCausalLM": read_mimo_v2,
}
