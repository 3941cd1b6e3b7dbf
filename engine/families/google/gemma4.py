"""Gemma 4: layers without a window have heads of another size; experts beside the MLP, or inputs of each layer, in some sizes.

Values may be keys. The last layers of the small models attend to the keys and values of earlier ones. Of a checkpoint with
vision and audio, the text part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.families.google.gemma import AROUND_MIXER, AROUND_MLP
from engine.families.reading import (
    FULL,
    SLIDING,
    Fields,
    attention,
    every,
    gated_mlp,
    layer_types,
    model,
    rope,
    sliding_window,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule
from engine.spec.attention import AttentionSpec, KVSharing, QkNorm, ValueSpec
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.experts import ExpertTensors, RouterSpec, SparseMlpSpec
from engine.spec.halves import LayerInputsSpec
from engine.spec.model import (
    BranchSpec,
    DenseBesideExpertsSpec,
    GatedMlpSpec,
    LayerSpec,
    ModelSpec,
    UnsupportedModelError,
)
from engine.weights.names import AS_OURS, StoredNames

SCALAR = "layer_scalar"
AROUND_INPUT = BranchSpec(after="post_per_layer_input_norm", scalar=SCALAR)
EXPERTS = ExpertTensors(router=("router.proj",), all=(("experts.gate_up_proj", "experts.down_proj"),))
OTHER_PARTS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
NAMES = StoredNames(
    renamed={"model.language_model.": "model."}, ignored=(*OTHER_PARTS, *(f"model.{part}" for part in OTHER_PARTS))
)


def read(fields: Fields) -> ModelSpec:
    """Gemma 4: layers without a window have heads of another size; some sizes have experts, or inputs of each layer."""
    return _read(fields, "gemma4_text")


def read_unified(fields: Fields) -> ModelSpec:
    """Gemma 4 12B: Gemma 4 with vision and audio inside the text model, of which the text is served."""
    return _read(fields, "gemma4_unified_text")


def _read(fields: Fields, model_type: str) -> ModelSpec:
    has_other_parts = "text_config" in fields
    fields.ignore("vision_config", "audio_config", "vision_soft_tokens_per_image")
    fields.ignore(*(name for name in fields if name.endswith(("_token_id", "_token_index"))))
    fields = with_defaults(fields.text(), model_type)
    fields.only("use_bidirectional_attention", "vision")
    kinds = layer_types(fields, every(fields, 6))
    kinds[-1] = FULL
    lenders, first = lenders_of(fields, kinds)
    inputs = _layer_inputs(fields)
    layers = [
        LayerSpec(
            mixer=_attention(
                fields,
                kind,
                index,
                KVSharing(lends=kind if index in lenders else "", borrows=kind if index >= first else ""),
            ),
            mlp=_mlp(fields, borrows=index >= first),
            around_mixer=AROUND_MIXER,
            around_mlp=AROUND_MLP if inputs else replace(AROUND_MLP, scalar=SCALAR),
            around_input=AROUND_INPUT if inputs else None,
        )
        for index, kind in enumerate(kinds)
    ]
    spec = model(
        fields,
        layers,
        stored=AS_OURS.without_keys(range(first, len(kinds))),
        embedding=EmbeddingSpec(multiplier=fields.number("hidden_size") ** 0.5, layer_inputs=inputs),
        head=HeadSpec(softcap=fields.real("final_logit_softcapping", 0.0)),
    )
    return spec.with_names(NAMES) if has_other_parts else spec


def lenders_of(fields: Fields, kinds: Sequence[str]) -> tuple[set[int], int]:
    """The layers that lend their KV to later ones, and the first of those."""
    num_borrowing = fields.count("num_kv_shared_layers")
    first = len(kinds) - num_borrowing
    if not num_borrowing:
        return set(), first
    last = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if lacking := set(kinds) - last.keys():
        raise UnsupportedModelError(
            f"config.json: num_kv_shared_layers = {num_borrowing}: no layer before them is of layer_types = {lacking}"
        )
    return {last[kind] for kind in kinds[first:]}, first


def _mlp(fields: Fields, *, borrows: bool) -> GatedMlpSpec | DenseBesideExpertsSpec:
    dense = gated_mlp(fields)
    if fields.flag("use_double_wide_mlp") and borrows:
        dense = replace(dense, size=2 * dense.size)
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block"):
        fields.ignore(*names)
        return dense
    num_experts, chosen, size = (fields.number(name) for name in names)
    if chosen > num_experts:
        raise UnsupportedModelError(f"config.json: top_k_experts = {chosen} of {num_experts} experts")
    rule = RoutingRule(chosen=chosen, renormalised=True)
    experts = SparseMlpSpec(
        num_experts=num_experts,
        size=size,
        router=RouterSpec(rule=rule, weight_scale="router.per_expert_scale"),
        tensors=EXPERTS,
        activation=dense.activation,
    )
    return DenseBesideExpertsSpec(
        dense=dense,
        experts=experts,
        after_dense="post_feedforward_layernorm_1",
        before_experts="pre_feedforward_layernorm_2",
        after_experts="post_feedforward_layernorm_2",
        router_norm="router.scale",
    )


def _layer_inputs(fields: Fields) -> LayerInputsSpec | None:
    size = fields.count("hidden_size_per_layer_input")
    if not size:
        fields.ignore("vocab_size_per_layer_input")
        return None
    rows, needed = fields.number("vocab_size_per_layer_input"), fields.number("vocab_size")
    if rows < needed:
        raise UnsupportedModelError(f"config.json: vocab_size_per_layer_input = {rows} of vocab_size = {needed}")
    return LayerInputsSpec(vocab_size=rows, size=size, activation=gated_mlp(fields).activation)


def _attention(fields: Fields, kind: str, index: int, sharing: KVSharing) -> AttentionSpec:
    bias, shares, window = fields.flag("attention_bias"), fields.flag("attention_k_eq_v"), sliding_window(fields)
    own = _own_sizes(fields, kind, index)
    return attention(
        fields,
        rope=rope(fields, kind=kind),
        head_dim=own.get("head_dim"),
        num_kv_heads=own.get("num_key_value_heads"),
        window=window if kind == SLIDING else 0,
        qk_norm=QkNorm(),
        values=ValueSpec(norm=True, are_keys=shares and kind == FULL),
        qkv_bias=bias,
        output_bias=bias,
        scale=1.0,
        sharing=sharing,
    )


def _own_sizes(fields: Fields, kind: str, index: int) -> Mapping[str, int]:
    """A layer's own sizes, in transformers' form or the published one."""
    by_layer = fields.get("per_layer_config")
    head_dim, heads = fields.count("global_head_dim"), fields.count("num_global_key_value_heads")
    if by_layer is not None:
        if not all(key.isdigit() for key in by_layer):
            raise UnsupportedModelError(
                f"config.json: per_layer_config = {sorted(by_layer)} does not name layers by number"
            )
        own: Mapping[str, Any] = {int(key): value for key, value in by_layer.items()}.get(index, {})
        if unknown := own.keys() - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(f"config.json: per_layer_config has {sorted(unknown)}, which is not supported")
        return {name: Fields(own).count(name) for name in own}
    if kind != FULL:
        return {}
    return {"head_dim": head_dim} | ({"num_key_value_heads": heads} if fields.flag("attention_k_eq_v") else {})
