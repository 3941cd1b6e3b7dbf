"""The residual stream that layers read and add to, and the branch that connects each half of a layer to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.forms import PLAIN, Added, InputForm, RankSum, Rows, over_ranks, summed, total_of
from engine.formats.product import Linear
from engine.model.layers.norm import Norm
from engine.spec.model import BranchSpec


@dataclass(frozen=True, slots=True)
class Lent:
    """A layer's keys and values for later layers that attend to them."""

    product: torch.Tensor | None  # set if attention reads keys and values there
    factors: torch.Tensor | None


class Stream:
    """The residual [T, E], and a pending product still to be added.

    That is nothing, a tensor [T, E], partial sums [P, T, E] or a sum over ranks. The next norm adds it up, because it reads the
    residual anyway.
    """

    __slots__ = ("_added", "_read", "_residual", "is_empty", "layer_inputs", "lent", "selected", "shortcut", "streams")

    def __init__(self, residual: torch.Tensor) -> None:
        self._residual = residual
        self._added: Added = None
        self._read: torch.Tensor | None = None  # kept for the layer's other half
        self.is_empty = False  # no row continues, because none is sampled
        self.layer_inputs: torch.Tensor | None = None  # [T, layers, size]
        self.lent: dict[str, Lent] = {}
        self.selected: torch.Tensor | None = None  # [T, K] int32: see `selected_positions`; None: dense attention
        self.shortcut: torch.Tensor | None = None  # [T, E], to be added after a later layer
        self.streams: torch.Tensor | None = None  # all streams [S, T, E], if the model has several

    def go_on_with(self, streams: torch.Tensor, active: int) -> None:
        """Continue with one of several streams. Layers add to it outside of them."""
        self.become(streams[active])
        self.streams = streams

    def become(self, residual: torch.Tensor) -> None:
        """Continue with this stream only."""
        self._residual, self._added, self.streams = residual, None, None

    def normed(self, norm: Norm, form: InputForm = PLAIN) -> Rows:
        """Add the pending product, and return the sum's norm [T, E] in a product's form."""
        rows, self._residual = norm.of_sum(self._added, self._residual, form)
        self._added = None
        return rows

    def normed_for_both(self, norm: Norm) -> torch.Tensor:
        """Add the pending product, and return the sum's norm [T, E], which the layer's other half reads, too."""
        self._read = x = self.normed(norm)
        return x

    @property
    def num_rows(self) -> int:
        return self._residual.shape[0]

    def read_again(self) -> torch.Tensor:
        """Return the input of the layer's first half."""
        assert self._read is not None, "the half before must say that it is read again"
        x, self._read = self._read, None
        return x

    @property
    def dtype(self) -> torch.dtype:
        return self._residual.dtype

    def whole(self) -> torch.Tensor:
        """Add the pending product, and return the sum [T, E]."""
        self._settle()
        return self._residual

    def total(self) -> torch.Tensor:
        """Return the sum [T, E], and leave its addition to the next norm."""
        self._added = over_ranks(self._added, self.dtype)
        return summed(self._added, self._residual)

    def plus(self, linear: Linear, x: Rows) -> None:
        """Add the product of rows, which are plain or in its form."""
        self._settle()
        self._added = linear.onto(self._residual, x)

    def add(self, added: torch.Tensor | RankSum) -> None:
        """Add a sum [T, E], its terms [P, T, E], or the ranks' sum of either."""
        self._settle()
        self._added = added

    def times(self, scalar: torch.Tensor | float) -> None:
        """Scale the whole stream."""
        self._settle()
        self._residual = self._residual * scalar

    def only(self, rows: torch.Tensor | None) -> None:
        """Continue with these rows only, [R] int32; None: no rows."""
        if rows is None:
            self.is_empty = True
            return
        if self._added is not None:
            self._added = self._added.index_select(-2, rows)
        if self._read is not None:
            self._read = self._read.index_select(0, rows)
        if self.selected is not None:
            self.selected = self.selected.index_select(0, rows)
        if self.layer_inputs is not None:
            self.layer_inputs = self.layer_inputs.index_select(0, rows)
        if self.shortcut is not None:
            self.shortcut = self.shortcut.index_select(0, rows)
        if self.streams is not None:
            self.streams = self.streams.index_select(1, rows)
        self._residual = self._residual.index_select(0, rows)

    def _settle(self) -> None:
        self._residual, self._added = summed(self._added, self._residual), None


class Branch:
    """The connection of one half of a layer to the stream: norms before and after, multipliers, parallel halves.

    `scalar` is the tensor [1] that `spec.scalar` names, or `spec.scale`; `is_read_again`: the next half reads the same.
    """

    def __init__(
        self,
        spec: BranchSpec,
        *,
        before: Norm | None,
        after: Norm | None,
        scalar: torch.Tensor | float | None,
        is_read_again: bool,
    ) -> None:
        self._before, self._after, self._scalar = before, after, scalar
        self._multiplier = spec.multiplier
        self._shares, self._is_read_again = spec.shares, is_read_again
        self._adds_plainly = after is None and spec.multiplier == 1.0

    def read(self, stream: Stream, form: InputForm = PLAIN) -> Rows:
        """Return the half's input, [T, E], in a product's form."""
        if self._shares:
            return form.of(stream.read_again())
        if self._before is None:
            return form.of(stream.whole())
        if self._is_read_again:
            return form.of(stream.normed_for_both(self._before))
        return stream.normed(self._before, form)

    def product(self, stream: Stream, linear: Linear, *, parts: bool = False) -> torch.Tensor:
        """Return the product of the half's input, [T, N], or its partial sums (`Linear.parts`)."""
        rows = self.read(stream, _wanted(linear, stream))
        return linear.parts(rows) if parts else linear(rows)

    def add_gated(self, stream: Stream, up: Linear, down: Linear, activation: str) -> None:
        """Add a whole gated MLP of the half's input."""
        form = _wanted(up, stream)
        rows = self.read(stream, form)
        if self._adds_plainly and form is not PLAIN:
            self.add(stream, down, up.gated_as(_wanted(down, stream), rows, activation))
        else:
            self.add(stream, down, up.gated(rows, activation))

    def add(self, stream: Stream, linear: Linear, x: Rows) -> None:
        """Add to the stream the product of x, which is plain or in its form."""
        if not self._adds_plainly:
            self.add_value(stream, linear(x))
            return
        stream.plus(linear, x)
        if self._scalar is not None:
            stream.times(self._scalar)

    def add_wanted(
        self, stream: Stream, linear: Linear, x: torch.Tensor, batch: ForwardBatch, *, is_last: bool
    ) -> None:
        """Add the product of x. After the last layer of a pass with prompts only the sampled rows continue."""
        if is_last and batch.has_prompts:
            rows = batch.sampled_rows if batch.num_sampled else None
            stream.only(rows)
            if rows is None:
                return
            x = x.index_select(0, rows)
        self.add(stream, linear, x)

    def add_both(self, stream: Stream, value: torch.Tensor | RankSum, linear: Linear, x: torch.Tensor) -> None:
        """Add a value, see `Stream.add`, and the product of x."""
        if self._adds_plainly:
            stream.add(value)
            self.add(stream, linear, x)
        else:
            self.add_value(stream, total_of(value, x.dtype) + linear(x))

    def add_value(self, stream: Stream, x: torch.Tensor | RankSum) -> None:
        """Add x to the stream, see `Stream.add`."""
        if not self._adds_plainly:
            x = total_of(x, stream.dtype)
            x = x if self._after is None else self._after(x)
            x = x if self._multiplier == 1.0 else x * self._multiplier
        stream.add(x)
        if self._scalar is not None:
            stream.times(self._scalar)


def _wanted(linear: Linear, stream: Stream) -> InputForm:
    return linear.wants(stream.num_rows, stream.dtype)
