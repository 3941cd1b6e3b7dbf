"""How one half of a layer reads the residual stream and adds to it: norms before and after, multipliers, parallel halves."""

from __future__ import annotations

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.fp8 import Fp8Linear
from engine.formats.grouped import Grouped
from engine.formats.int8 import Int8Linear
from engine.formats.product import Linear
from engine.kernels.quantised.fp8 import Fp8Rows, quantise_rows
from engine.kernels.quantised.int8 import Int8Rows
from engine.model.layers.norm import Norm, RmsNorm
from engine.model.stream import Stream
from engine.spec.model import BranchSpec

Rounds = Fp8Linear | Grouped  # products whose rows may be 8-bit floats


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
        self._is_shared = spec.shares or is_read_again
        self._adds_plainly = after is None and spec.multiplier == 1.0

    def read(self, stream: Stream) -> torch.Tensor:
        """Return what the half computes on, [T, E]."""
        if self._shares:
            return stream.read_again()
        if self._before is None:
            return stream.whole()
        return stream.normed(self._before, again=self._is_read_again)

    def product(self, stream: Stream, linear: Linear, *, parts: bool = False) -> torch.Tensor:
        """Return the product of what the half computes on, [T, N], or its partial sums (`Linear.parts`)."""
        if isinstance(linear, Rounds) and (rows := self._rounded(stream, linear)) is not None:
            return linear.of_rows(rows, parts=parts)
        if isinstance(linear, Int8Linear):
            return linear.of_rows(self._codes(stream, linear))
        x = self.read(stream)
        return linear.parts(x) if parts else linear(x)

    def gated(self, stream: Stream, linear: Linear, activation: str) -> torch.Tensor:
        """Return act(first half) * second half of that product."""
        if isinstance(linear, Rounds) and (rows := self._rounded(stream, linear)) is not None:
            return linear.gated_of_rows(rows, activation)
        return linear.gated(self.read(stream), activation)

    def add_gated(self, stream: Stream, up: Linear, down: Linear, activation: str) -> None:
        """Add a whole gated MLP of what the half computes on."""
        if self._adds_plainly and isinstance(up, Rounds) and isinstance(down, Rounds):
            self._add_rounded(stream, up, down, activation)
        elif self._adds_plainly and isinstance(up, Int8Linear) and isinstance(down, Int8Linear):
            stream.plus_codes(down, up.gated_rows(self._codes(stream, up), activation, down))
        else:
            self.add(stream, down, self.gated(stream, up, activation))
            return
        if self._scalar is not None:
            stream.times(self._scalar)

    def _add_rounded(self, stream: Stream, up: Rounds, down: Rounds, activation: str) -> None:
        """Add a gated MLP whose products round what they read."""
        rounding = down.rounding(stream.num_rows, stream.dtype)
        if rounding is not None and (rows := self._rounded(stream, up)) is not None:
            stream.add(down.of_rows(up.gated_rows(rows, rounding, activation), parts=True))
        else:
            stream.plus(down, self.gated(stream, up, activation))

    def _rounded(self, stream: Stream, linear: Rounds) -> Fp8Rows | None:
        """Return what the half computes on as a product rounds it; None: it doesn't."""
        norm, rounding = self._before, linear.rounding(stream.num_rows, stream.dtype)
        if rounding is None:
            return None
        if isinstance(norm, RmsNorm) and not self._is_shared:
            return stream.normed_rows(norm, rounding)
        return quantise_rows(self.read(stream), rounding)

    def _codes(self, stream: Stream, linear: Int8Linear) -> Int8Rows:
        """Return what the half computes on, in whole numbers for a product."""
        if isinstance(self._before, RmsNorm) and not self._is_shared:
            return stream.normed_codes(self._before, linear)
        return linear.rows(self.read(stream))

    def add(self, stream: Stream, linear: Linear, x: torch.Tensor) -> None:
        """Add the product of x to the stream."""
        if not self._adds_plainly:
            self.add_value(stream, linear(x))
            return
        stream.plus(linear, x)
        if self._scalar is not None:
            stream.times(self._scalar)

    def add_wanted(
        self, stream: Stream, linear: Linear, x: torch.Tensor, batch: ForwardBatch, *, is_last: bool
    ) -> None:
        """Add the product of x. Behind the last layer of a pass with prompts only the sampled rows go on."""
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


def _summed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.sum(dim=0) if x.dim() == 3 else x).to(dtype)
