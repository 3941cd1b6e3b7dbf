"""A model whose tensors have the names from `engine.checkpoint.gguf_names`.

Folders name the same things in many ways, files in one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from engine.spec.attention import AttentionSpec
from engine.spec.experts import ExpertTensors, SparseMlpSpec
from engine.spec.mla import MLASpec
from engine.spec.model import (
    BranchSpec,
    DenseBesideExpertsSpec,
    GatedMlpSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    PlainMlpSpec,
    SideBySideSpec,
)
from engine.spec.states import DeltaSpec

_GATE, _UP, _GATE_UP, _DOWN = (f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "gate_up", "down"))


def as_in_file(spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
    """The same model with a file's tensor names. `tensors`: those of the file."""
    layers = tuple(_layer(layer, f"blk.{index}.", tensors) for index, layer in enumerate(spec.layers))
    return replace(spec, layers=layers, head=replace(spec.head, norm="model.norm"))


def _layer(layer: LayerSpec, under: str, tensors: Collection[str]) -> LayerSpec:
    """A layer's names: norms have the file's own, where one name between the halves means either of two."""
    mixer, mlp, around = layer.mixer, layer.mlp, layer.around_mlp
    known = ("ffn_norm", "ffn_norm.weight", "post_attention_norm.weight")
    before_mlp = next((name for name in known if under + name in tensors), "attn_norm").removesuffix(".weight")
    laurel = layer.laurel
    return replace(
        layer,
        mixer=None if mixer is None else _mixer(mixer, under, tensors),
        laurel=None if laurel is None else replace(laurel, before="attn_norm"),
        mlp=None if mlp is None else _mlp(mlp, under, tensors),
        around_mixer=_branch(layer.around_mixer, "attn_norm", "post_attention_norm"),
        around_mlp=_branch(around, before_mlp, "post_ffw_norm"),
    )


def _branch(branch: BranchSpec, before: str, after: str) -> BranchSpec:
    return replace(branch, before=before if branch.before else "", after=after if branch.after else "")


def _mixer(mixer: MixerSpec, under: str, tensors: Collection[str]) -> MixerSpec:
    if isinstance(mixer, AttentionSpec):
        fused = "self_attn.qkv_proj" if f"{under}attn_qkv.weight" in tensors else ""
        norm = mixer.qk_norm
        if norm is not None and "{}" not in norm.q_name:
            norm = replace(norm, q_name="self_attn.q_norm", k_name="self_attn.k_norm")
        projections = replace(mixer.projections, fused=fused, output="self_attn.o_proj")
        return replace(mixer, projections=projections, qk_norm=norm)
    if isinstance(mixer, MLASpec):
        return replace(mixer, by_head=f"{under}attn_k_b.weight" in tensors)
    if isinstance(mixer, DeltaSpec):
        return replace(mixer, stored="apart_but_rates" if f"{under}ssm_ba.weight" in tensors else "apart")
    if isinstance(mixer, SideBySideSpec):
        attention = _mixer(mixer.attention, under, tensors)
        assert isinstance(attention, AttentionSpec)
        around = replace(mixer.around_mamba, before="attn_norm")
        return replace(mixer, attention=attention, around_mamba=around)
    return mixer


def _mlp(mlp: MlpSpec, under: str, tensors: Collection[str]) -> MlpSpec:
    if isinstance(mlp, GatedMlpSpec):
        return _gated(mlp, under, tensors)
    if isinstance(mlp, PlainMlpSpec):
        return replace(mlp, up="mlp.up_proj", down="mlp.down_proj")
    if isinstance(mlp, DenseBesideExpertsSpec):
        return replace(mlp, dense=_gated(mlp.dense, under, tensors), experts=_experts(mlp.experts, under, tensors))
    assert isinstance(mlp, SparseMlpSpec), "no GGUF file of a family has another kind"
    return _experts(mlp, under, tensors)


def _gated(mlp: GatedMlpSpec, under: str, tensors: Collection[str]) -> GatedMlpSpec:
    """Gate and up as two tensors, or both in `ffn_up`."""
    fused = "" if f"{under}ffn_gate.weight" in tensors else "mlp.up_proj"
    return replace(mlp, under="mlp", gate="gate_proj", up="up_proj", fused=fused, down="mlp.down_proj")


def _experts(mlp: SparseMlpSpec, under: str, tensors: Collection[str]) -> SparseMlpSpec:
    shared = mlp.shared
    if shared is not None:
        shared = replace(shared, under="mlp.shared_experts", gate_up=None, down="down_proj")
    first = (_GATE, _UP) if mlp.has_gates else (_UP,)
    if f"{under}ffn_gate_up_exps.weight" in tensors:
        first = (_GATE_UP,)
    names = ExpertTensors(
        each=(*first, _DOWN),
        all=(),
        correction=("mlp.gate.correction",) if mlp.tensors.correction else (),
    )
    return replace(mlp, tensors=names, shared=shared)
