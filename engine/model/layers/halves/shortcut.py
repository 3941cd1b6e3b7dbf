"""Shortcut experts: they read the input of a gated MLP, and their output is added after a later layer."""

from __future__ import annotations

from engine.formats.forms import total_of
from engine.model.layers.building import Surroundings
from engine.model.layers.mlp import GatedMlp
from engine.model.layers.sparse_mlp import Mixture
from engine.model.stream import Stream
from engine.spec.model import ShortcutSpec


class Shortcut:
    def __init__(self, spec: ShortcutSpec, around: Surroundings) -> None:
        self._branch = around.branch
        self._dense, self._experts = GatedMlp(spec.dense, around), Mixture(spec.experts, around)

    def __call__(self, stream: Stream) -> None:
        x = self._branch.read(stream)
        stream.shortcut = total_of(self._experts(x), x.dtype)
        self._branch.add_value(stream, self._dense.of(x))


def end_shortcut(stream: Stream) -> None:
    """Add the output of an earlier layer's experts."""
    assert stream.shortcut is not None, "no layer before has begun one"
    stream.add(stream.shortcut)
    stream.shortcut = None
