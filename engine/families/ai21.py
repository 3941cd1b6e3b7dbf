"""AI21 Labs: Jamba."""

from __future__ import annotations

from engine.families.reading import (
    FULL,
    LINEAR,
    Family,
    Fields,
    attention,
    checked,
    gated_mlp,
    model,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.ends import HeadSpec
from engine.spec.experts import ExpertTensors
from engine.spec.model import BranchSpec, LayerSpec, MixerSpec, MlpSpec, ModelSpec, UnsupportedModelError
from engine.spec.states import SelectiveSpec

EACH = ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj", "feed_forward.experts.{}.down_proj")
TENSORS = ExpertTensors(
    router=("feed_forward.router",),
    each=EACH,
    all=(("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
)
AROUND_MLP = BranchSpec(before="pre_ff_layernorm")
# Fields about the implementation of scans, and about which logits are computed.
HARMLESS = (
    "use_mamba_kernels",
    "use_mambapy",
    "use_associative_scan",
    "num_logits_to_keep",
    "calc_logits_for_entire_prompt",
)


def read_jamba(fields: Fields) -> ModelSpec:
    """Jamba: the first Mamba in most layers, attention without rope in some; MLPs, and experts every few layers, or none."""
    fields = with_defaults(fields, "jamba")
    fields.ignore(*HARMLESS)
    fields.only("sliding_window")
    with_attention, with_experts = _each(fields, "attn_layer"), _each(fields, "expert_layer")
    if not any(with_attention):
        raise UnsupportedModelError("config.json: attn_layer_offset leaves no layer with attention: not supported")
    mixers: dict[bool, MixerSpec] = {True: attention(fields, rope=None), False: _selective(fields)}
    mlps: dict[bool, MlpSpec] = {False: gated_mlp(fields, under="feed_forward", down="feed_forward.down_proj")}
    mlps[True] = _experts(fields) or mlps[False]
    layers = [
        LayerSpec(mixer=mixers[attends], mlp=mlps[is_sparse], around_mlp=AROUND_MLP)
        for attends, is_sparse in zip(with_attention, with_experts, strict=True)
    ]
    _check_names(fields, with_attention)
    return model(fields, layers, head=HeadSpec(norm="model.final_layernorm"))


def _selective(fields: Fields) -> SelectiveSpec:
    hidden, taps, bias = fields.number("hidden_size"), fields.number("mamba_d_conv"), fields.flag("mamba_proj_bias")
    if taps < 2:
        raise UnsupportedModelError("config.json: mamba_d_conv = 1 is not supported")
    rank = -(-hidden // 16) if fields.get("mamba_dt_rank") == "auto" else fields.number("mamba_dt_rank")
    return SelectiveSpec(
        size=fields.number("mamba_expand") * hidden,
        state_size=fields.number("mamba_d_state"),
        rank=rank,
        taps=taps,
        taps_bias=fields.flag("mamba_conv_bias"),
        in_bias=bias,
        out_bias=bias,
    )


def _experts(fields: Fields) -> MlpSpec | None:
    """Read the experts; None: there is one, which is an MLP."""
    if fields.number("num_experts") == 1:
        fields.ignore("num_experts_per_tok")
        return None
    rule = RoutingRule(chosen=fields.number("num_experts_per_tok"), score=Score.SOFTMAX)
    return sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS)


def _each(fields: Fields, name: str) -> list[bool]:
    """True for layers that are `period` apart, from `offset` on."""
    period, offset = fields.number(f"{name}_period"), fields.count(f"{name}_offset")
    if offset >= period:
        raise UnsupportedModelError(f"config.json: {name}_offset = {offset} is not below {name}_period = {period}")
    return [layer % period == offset for layer in range(fields.number("num_hidden_layers"))]


def _check_names(fields: Fields, with_attention: list[bool]) -> None:
    """Check the names that a checkpoint may give again."""
    for name, linear, full in (("layers_block_type", "mamba", "attention"), ("layer_types", LINEAR, FULL)):
        fields.only(name, [full if attends else linear for attends in with_attention])


FAMILIES: dict[str, Family] = {
    "JambaForCausalLM": read_jamba,
}
