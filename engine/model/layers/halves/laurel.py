"""LAuReL: a low-rank residual. The mixer's input is added, with a normed low-rank projection of it."""

from __future__ import annotations

from engine.formats.product import LinearSpec
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.spec.halves import LaurelSpec
from engine.weights.parameters import Shard


class Laurel:
    """The LAuReL branch of a layer, before the mixer."""

    def __init__(self, spec: LaurelSpec, around: Surroundings) -> None:
        hidden = around.model.hidden_size
        inward, outward = {"laurel.linear_left": spec.rank}, {"laurel.linear_right": hidden}
        self._branch, self._norm = around.branch, around.norm(spec.after, hidden)
        self._inward = around.linear(LinearSpec(inputs=hidden, outputs=inward, bias=False, shard=Shard.NONE))
        self._outward = around.linear(LinearSpec(inputs=spec.rank, outputs=outward, bias=False, shard=Shard.NONE))

    def __call__(self, stream: Stream) -> None:
        x = self._branch.read(stream)
        self._branch.add_value(stream, x + self._norm(self._outward(self._inward(x))))
