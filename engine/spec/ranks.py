"""One rank's share of a model: heads, intermediate sizes and experts are shared out, all else is on every rank.

Key and value heads are replicated where there are more ranks than heads, and so are latents (MLA). Recurrent layers are
computed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from engine.kernels.attention import HeadShape
from engine.spec.attention import AttentionSpec, HeadShare
from engine.spec.experts import SparseMlpSpec
from engine.spec.mla import MLASpec
from engine.spec.model import (
    DenseBesideExpertsSpec,
    DraftSpec,
    GatedMlpSpec,
    LayerSpec,
    ModelSpec,
    PlainMlpSpec,
    ShortcutSpec,
    SideBySideSpec,
    UnsupportedModelError,
)

FLAG = "--tensor-parallel-size"
Spec = TypeVar("Spec")


def for_rank(model: ModelSpec, rank: int, size: int) -> ModelSpec:
    """Return the model as one rank computes it. Raises UnsupportedModelError where ranks can't share it."""
    if size == 1:
        return model
    draft = None if model.draft is None else draft_for_rank(model.draft, rank, size)
    return replace(model, layers=_shared(model.layers, rank, size), draft=draft)


def draft_for_rank(draft: DraftSpec, rank: int, size: int) -> DraftSpec:
    """Return a drafter whose layers one rank computes its part of. Raises UnsupportedModelError."""
    return replace(draft, layers=_shared(draft.layers, rank, size))


def _shared(layers: Iterable[LayerSpec], rank: int, size: int) -> tuple[LayerSpec, ...]:
    """Each layer as one rank computes it."""
    return tuple(
        replace(layer, mixer=own_share(layer.mixer, rank, size), mlp=own_share(layer.mlp, rank, size))
        for layer in layers
    )


def with_cut_experts(model: ModelSpec) -> ModelSpec:
    """Return the model with experts of which ranks have a part each."""
    return replace(model, layers=tuple(replace(layer, mlp=_cut(layer.mlp)) for layer in model.layers))


def experts_in(mlp: object) -> SparseMlpSpec | None:
    """Return an MLP's experts, also those beside another one; None without any."""
    match mlp:
        case SparseMlpSpec():
            return mlp
        case DenseBesideExpertsSpec() | ShortcutSpec():
            return mlp.experts
    return None


def _cut(mlp: Spec) -> Spec:
    match mlp:
        case SparseMlpSpec():
            return replace(mlp, is_cut=True)
        case DenseBesideExpertsSpec() | ShortcutSpec():
            return replace(mlp, experts=_cut(mlp.experts))
    return mlp


def own_share(spec: Spec, rank: int, size: int) -> Spec:
    """Return one rank's part of a mixer or an MLP. Raises UnsupportedModelError."""
    share = spec if size == 1 else _share(spec, rank, size)
    return share  # type: ignore[return-value]


def _share(spec: object, rank: int, size: int) -> object:
    match spec:
        case AttentionSpec():
            return _attention(spec, rank, size)
        case MLASpec():
            heads = _part(spec.sizes.num_heads, "attention heads", size)
            return replace(spec, sizes=replace(spec.sizes, num_heads=heads))
        case SideBySideSpec():
            return replace(spec, attention=_attention(spec.attention, rank, size))
        case GatedMlpSpec():
            if spec.sparsity:
                raise _refused("MLPs that compare all gates of a token", size)
            return replace(spec, size=_part(spec.size, "intermediate features", size))
        case PlainMlpSpec():
            return replace(spec, size=_part(spec.size, "intermediate features", size))
        case SparseMlpSpec():
            return _experts(spec, size)
        case DenseBesideExpertsSpec() | ShortcutSpec():
            dense, experts = own_share(spec.dense, rank, size), _experts(spec.experts, size)
            return replace(spec, dense=dense, experts=experts)
    return spec


def _attention(spec: AttentionSpec, rank: int, size: int) -> AttentionSpec:
    all_heads = spec.heads.num_kv_heads
    heads = _part(spec.heads.num_heads, "attention heads", size)
    is_replicated = size > all_heads
    if (size if is_replicated else all_heads) % (all_heads if is_replicated else size):
        raise _uneven(all_heads, "key and value heads", size)
    if spec.qk_norm is not None and spec.qk_norm.over != "head":
        raise _refused("norms of all heads together, or of each by weights of its own,", size)
    if is_replicated and (spec.gate_size or spec.value_size != spec.heads.head_dim):
        raise _refused("replicated heads with an output gate or smaller values", size)
    count = 1 if is_replicated else all_heads // size
    first = rank // (size // all_heads) if is_replicated else rank * count
    return replace(
        spec,
        heads=HeadShape(heads, count, spec.heads.head_dim),
        shared=HeadShare(first=first, of=all_heads),
    )


def _experts(spec: SparseMlpSpec, size: int) -> SparseMlpSpec:
    if spec.identities:
        raise _refused("identity experts", size)
    shared = spec.shared
    if shared is not None:
        if shared.gate_up is not None:
            raise _refused("a shared expert with gate and up in one tensor", size)
        shared = replace(shared, size=_part(shared.size, "features of the shared expert", size))
    if not spec.is_cut:
        if spec.num_experts % size:
            raise _uneven(spec.num_experts, "experts", size, or_else="--no-enable-expert-parallel")
        return replace(spec, num_experts=spec.num_experts // size, shared=shared)
    each = spec.tensors.each
    if each is None or len(each) < (3 if spec.has_gates else 2) or spec.expert_bias:
        raise UnsupportedModelError(
            f"{FLAG} {size}: experts with biases, or several matrices in one tensor, aren't cut: take --enable-expert-parallel"
        )
    return replace(spec, size=_part(spec.size, "features of an expert", size), shared=shared)


def _part(count: int, what: str, size: int) -> int:
    if count % size:
        raise _uneven(count, what, size)
    return count // size


def _uneven(count: int, what: str, size: int, *, or_else: str = "1") -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{FLAG} {size}: ranks can't share {count} {what}: take a number that divides them, or {or_else}"
    )


def _refused(what: str, size: int) -> UnsupportedModelError:
    return UnsupportedModelError(f"{FLAG} {size}: {what} aren't shared by ranks yet: take 1")
