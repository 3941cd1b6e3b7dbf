"""Kimi (Moonshot AI): Kimi-Linear, Kimi-VL and Kimi K2.5; Kimi K2 calls itself DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping

from engine.families.deepseek import read_v3
from engine.families.reading import (
    CORRECTED,
    FULL,
    LINEAR,
    Family,
    Fields,
    gated_mlp,
    layer_types,
    model,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    with_defaults,
    without_predictions,
    without_rope,
)
from engine.spec.experts import ExpertTensors
from engine.spec.mla import MLASpec
from engine.spec.model import LayerSpec, MlpSpec, ModelSpec, UnsupportedModelError
from engine.spec.states import ChannelDeltaSpec
from engine.weights.names import StoredNames

DENSE, SPARSE = "dense", "sparse"
# Its own names of fields that other families have, too.
OURS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
LINEAR_FIELDS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
EACH = ("mlp.experts.{}.w1", "mlp.experts.{}.w3", "mlp.experts.{}.w2")
TENSORS = ExpertTensors(each=EACH, correction=CORRECTED.correction)
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "mm_projector.")
VISION = StoredNames(
    renamed={
        "language_model.model.blocks.": "model.layers.",  # as transformers 5.17 saves them
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored=(*OTHER_PARTS, *(f"model.{part}" for part in OTHER_PARTS)),
)
OF_TOWERS = ("vision_config", "projection_hidden_size", "projection_hidden_act", "projection_layer_norm_eps")


def read_kimi_linear(fields: Fields) -> ModelSpec:
    """Kimi-Linear: three layers of four keep a state, whose channels decay each alone, the fourth MLA without rope; experts."""
    fields = with_defaults(_with_our_names(fields), "kimi_linear")
    fields.only("mla_use_nope", True)
    fields.only("use_grouped_topk", True)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("moe_layer_freq", 1)
    fields.ignore("rope_theta", "rope_parameters", "rope_scaling", "linear_attn_config", *OURS)
    num_layers, num_dense = fields.number("num_hidden_layers"), fields.count("first_k_dense_replace")
    kinds = layer_types(fields, _default_kinds(num_layers), known=(FULL, LINEAR))
    if FULL not in kinds:
        raise UnsupportedModelError(f"config.json: layer_types without {FULL} is not supported")
    mlps = list(fields.get("mlp_layer_types") or [SPARSE if at >= num_dense else DENSE for at in range(num_layers)])
    if set(mlps) - {DENSE, SPARSE} or len(mlps) != num_layers:
        raise UnsupportedModelError(f"config.json: mlp_layer_types = {mlps!r:.80} is not supported")
    attention = without_rope(fields, value_dim=fields.number("v_head_dim"))
    mixers: dict[str, MLASpec | ChannelDeltaSpec] = {FULL: attention, LINEAR: _delta(fields)}
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=TENSORS, shared=shared_experts(fields))
    by_kind: dict[str, MlpSpec] = {DENSE: gated_mlp(fields), SPARSE: sparse}
    layers = [LayerSpec(mixer=mixers[kind], mlp=by_kind[mlp]) for kind, mlp in zip(kinds, mlps, strict=True)]
    return model(fields, layers, stored=_names(fields, num_layers))


def _with_our_names(fields: Fields) -> Fields:
    """The same fields under other families' names, with those of `linear_attn_config`."""
    found = {ours: fields[name] for name, ours in OURS.items() if name in fields}
    inner = fields.get("linear_attn_config") or {}
    if not isinstance(inner, Mapping):
        raise UnsupportedModelError(f"config.json: linear_attn_config must be an object, not {inner!r:.40}")
    lists = ("full_attn_layers", "kda_layers")
    if unknown := sorted(inner.keys() - LINEAR_FIELDS.keys() - set(lists)):
        raise UnsupportedModelError(f"config.json: linear_attn_config.{unknown[0]} is not supported")
    found |= {ours: inner[name] for name, ours in LINEAR_FIELDS.items() if name in inner}
    if fields.get("layer_types") is None and all(name in inner for name in lists):
        full, linear = (set(inner[name]) for name in lists)  # counted from 1
        numbers = range(1, fields.number("num_hidden_layers") + 1)
        if full & linear or full | linear != set(numbers):
            raise UnsupportedModelError("config.json: linear_attn_config does not name each layer once")
        found["layer_types"] = [FULL if layer in full else LINEAR for layer in numbers]
    return fields.with_values(**found)


def _default_kinds(num_layers: int) -> list[str]:
    return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]


def _delta(fields: Fields) -> ChannelDeltaSpec:
    taps = fields.number("linear_conv_kernel_dim")
    if taps < 2:
        raise UnsupportedModelError("config.json: linear_conv_kernel_dim = 1 is not supported")
    heads, dim = fields.number("linear_num_heads"), fields.number("linear_head_dim")
    return ChannelDeltaSpec(num_heads=heads, head_dim=dim, taps=taps)


def _names(fields: Fields, num_layers: int) -> StoredNames:
    """MLPs of layers with experts have another name, and transformers writes all with it."""
    layers = [f"model.layers.{layer}." for layer in range(num_layers)]
    renamed = {f"{layer}block_sparse_moe.": f"{layer}mlp." for layer in layers}
    return StoredNames(renamed=renamed, ignored=without_predictions(fields).ignored)


def read_kimi_vision(fields: Fields) -> ModelSpec:
    """Kimi-VL and Kimi K2.5: DeepSeek-V3's text model in a checkpoint with a vision tower."""
    fields.ignore(*OF_TOWERS, "video_placeholder", "media_placeholder_token_id", "ignore_index")
    fields.ignore(*(name for name in fields if name.endswith("_token_id")))
    text = fields.text()
    text.only("model_type", "deepseek_v3", "kimi_k2")
    return read_v3(text).with_names(VISION)


FAMILIES: dict[str, Family] = {
    "KimiLinearForCausalLM": read_kimi_linear,
    "KimiVLForConditionalGeneration": read_kimi_vision,
    "KimiK25ForConditionalGeneration": read_kimi_vision,
    "Kimi_K25ForConditionalGeneration": read_kimi_vision,
}
