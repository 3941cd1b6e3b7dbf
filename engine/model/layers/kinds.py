"""Layer kinds: the class that computes each spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.batch.batch import ForwardBatch
from engine.model.layers.attention import GroupedQueryAttention
from engine.model.layers.building import Surroundings
from engine.model.layers.channel_delta import ChannelDelta
from engine.model.layers.delta import GatedDelta
from engine.model.layers.dense_beside_experts import DenseBesideExperts
from engine.model.layers.halves.shortcut import Shortcut
from engine.model.layers.mamba import Mamba
from engine.model.layers.mla.attention import MLAAttention
from engine.model.layers.mlp import GatedMlp, PlainMlp
from engine.model.layers.selective import Selective
from engine.model.layers.short_convolution import ShortConvolution
from engine.model.layers.side_by_side import SideBySide
from engine.model.layers.sparse_mlp import SparseMlp
from engine.model.stream import Stream
from engine.spec.attention import AttentionSpec
from engine.spec.experts import SparseMlpSpec
from engine.spec.mla import MLASpec
from engine.spec.model import DenseBesideExpertsSpec, GatedMlpSpec, PlainMlpSpec, ShortcutSpec, SideBySideSpec
from engine.spec.states import ChannelDeltaSpec, DeltaSpec, MambaSpec, SelectiveSpec, ShortConvolutionSpec


class Mixer(Protocol):
    """The part of a layer in which tokens attend to earlier ones."""

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[Any], *, is_last: bool) -> None:
        """Read the stream, write to the pool for later tokens, add to the stream.

        `kept`: the layer's strided views of the pool, [num_blocks, planes, slots, heads, dim], as its spec's `kept` lists them;
        of a state a `KeptState`.
        `is_last`: only the sampled rows go on from here, if any.
        """
        ...


class Mlp(Protocol):
    """The part of a layer that works on each token alone."""

    def __call__(self, stream: Stream) -> None: ...


MIXERS: dict[type, Callable[[Any, Surroundings], Mixer]] = {
    AttentionSpec: GroupedQueryAttention,
    ChannelDeltaSpec: ChannelDelta,
    DeltaSpec: GatedDelta,
    MLASpec: MLAAttention,
    MambaSpec: Mamba,
    SelectiveSpec: Selective,
    ShortConvolutionSpec: ShortConvolution,
    SideBySideSpec: SideBySide,
}
MLPS: dict[type, Callable[[Any, Surroundings], Mlp]] = {
    GatedMlpSpec: GatedMlp,
    PlainMlpSpec: PlainMlp,
    SparseMlpSpec: SparseMlp,
    DenseBesideExpertsSpec: DenseBesideExperts,
    ShortcutSpec: Shortcut,
}
