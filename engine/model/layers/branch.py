"""The connection of one half of a layer to the residual stream: norms before and after, multipliers, parallel halves."""

from __future__ import annotations

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.forms import PLAIN, InputForm, Rows
from engine.formats.product import Linear
from engine.model.layers.norm import Norm
from engine.model.stream import Stream
from engine.spec.model import BranchSpec


class Branch:
    """`scalar` is the tensor [1] that `spec.scalar` names, or `spec.scale`; `is_read_again`: the next half reads the same."""

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

    def add_both(self, stream: Stream, value: torch.Tensor, linear: Linear, x: torch.Tensor) -> None:
        """Add a value [T, E], or its terms [P, T, E], and the product of x."""
        if self._adds_plainly:
            stream.add(value)
            self.add(stream, linear, x)
        else:
            self.add_value(stream, _summed(value, x.dtype) + linear(x))

    def add_value(self, stream: Stream, x: torch.Tensor) -> None:
        """Add x [T, E] to the stream, or its terms [P, T, E]."""
        if not self._adds_plainly:
            x = _summed(x, stream.dtype)
        if self._after is not None:
            x = self._after(x)
        stream.add(x if self._multiplier == 1.0 else x * self._multiplier)
        if self._scalar is not None:
            stream.times(self._scalar)


def _wanted(linear: Linear, stream: Stream) -> InputForm:
    return linear.wants(stream.num_rows, stream.dtype)


def _summed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.sum(dim=0) if x.dim() == 3 else x).to(dtype)
