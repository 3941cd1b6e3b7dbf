"""Poolside: Laguna."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    CORRECTED,
    DEFAULT_ROPES,
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    Family,
    Fields,
    attention,
    checked,
    gated_mlp,
    layer_types,
    layers_by_kind,
    model,
    rope,
    sliding_window,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec, OutputGate, QkNorm
from engine.spec.experts import SharedExpertSpec
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError
from engine.weights.names import StoredNames

PER_HEAD = "per-head"
MOST_HEADS = 1 << 16
IN_EXPERTS = replace(CORRECTED, correction=("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"))


def read_laguna(fields: Fields) -> ModelSpec:
    """Laguna (Poolside): a softplus gate of each head's output; windows, rotations and heads by layer."""
    fields = with_defaults(fields, "laguna")
    if not fields.get("rope_parameters"):
        fields = fields.with_values(rope_parameters=DEFAULT_ROPES["laguna"])
    fields.only("norm_topk_prob", True)
    fields.only("decoder_sparse_step", 1)
    fields.only("qkv_bias", False)
    for name in ("moe_apply_router_weight_on_input", "swa_attention_sink_enabled"):
        fields.only(name, False)
    fields.only("moe_router_logit_softcapping", 0)
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        score=Score.SIGMOID,
        renormalised=True,
        scale=fields.real("moe_routed_scaling_factor", 1.0),
    )
    shared = SharedExpertSpec(size=fields.number("shared_expert_intermediate_size"), under="mlp.shared_expert")
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, checked(fields, rule), tensors=IN_EXPERTS, shared=shared)
    num_layers = fields.number("num_hidden_layers")
    kinds = layer_types(fields, [FULL] * num_layers)
    layers = [
        LayerSpec(mixer=mixer, mlp=sparse if there else dense)
        for mixer, there in zip(_mixers(fields, kinds), _behind_named(fields), strict=True)
    ]
    # Transformers renames the shared expert in memory.
    at = [f"model.layers.{layer}.mlp." for layer in range(num_layers)]
    names = StoredNames(renamed={f"{each}shared_experts.": f"{each}shared_expert." for each in at})
    return model(fields, layers, stored=names)


def _mixers(fields: Fields, kinds: list[str]) -> list[AttentionSpec]:
    gating, window = fields.get("gating"), sliding_window(fields)
    fields.only("attention_bias", False)
    fields.only("gating", True, PER_HEAD, "per-element")
    by_head = gating in (None, True, PER_HEAD)
    fields.only("gating_types", [PER_HEAD if by_head else "per-element"] * len(kinds))
    of_kind = {
        kind: attention(
            fields, rope=rope(fields, kind=kind), window=window if kind == SLIDING else 0, qk_norm=QkNorm(),
            gate=OutputGate(module="self_attn.g_proj", by_head=by_head, activation="softplus"),
        )
        for kind in set(kinds)
    }  # fmt: skip
    heads = fields.get("num_attention_heads_per_layer") or [fields.number("num_attention_heads")] * len(kinds)
    kv_heads = fields.number("num_key_value_heads")
    if len(heads) != len(kinds) or not all(type(each) is int and 0 < each <= MOST_HEADS for each in heads):
        raise UnsupportedModelError(
            f"config.json: num_attention_heads_per_layer = {heads!r:.80} must be a count for each of {len(kinds)} layers"
        )
    if wrong := [each for each in heads if each % kv_heads]:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads_per_layer = {wrong[0]} is no multiple of num_key_value_heads = {kv_heads}"
        )
    return [
        replace(of_kind[kind], heads=replace(of_kind[kind].heads, num_heads=each))
        for kind, each in zip(kinds, heads, strict=True)
    ]


def _behind_named(fields: Fields) -> list[bool]:
    """True for layers with experts: all but those of `mlp_only_layers`, which may repeat `mlp_layer_types`."""
    named, num_layers = fields.get("mlp_only_layers"), fields.number("num_hidden_layers")
    default = [DENSE if layer in ([0] if named is None else named) else SPARSE for layer in range(num_layers)]
    found = layers_by_kind(fields, default)
    if named is not None and found != [kind == SPARSE for kind in default]:
        raise UnsupportedModelError(f"config.json: mlp_only_layers = {named!r:.80} and mlp_layer_types differ")
    return found


FAMILIES: dict[str, Family] = {
    "LagunaForCausalLM": read_laguna,
}
