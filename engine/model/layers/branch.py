"""How one half of a layer reads the residual stream and adds to it: norms before and after, multipliers, parallel halves."""

from __future__ import annotations

import torch

from engine.model.formats.product import Linear
from engine.model.layers.norm import Norm
from engine.model.spec import BranchSpec
from engine.model.stream import Stream


class Branch:
    """`scalar` [1] is the tensor that `spec.scalar` names; `is_read_again`: the layer's other half shares what this one reads."""

    def __init__(
        self,
        spec: BranchSpec,
        *,
        before: Norm | None,
        after: Norm | None,
        scalar: torch.Tensor | None,
        is_read_again: bool,
    ) -> None:
        self._before, self._after, self._scalar = before, after, scalar
        self._multiplier = spec.multiplier
        self._shares, self._is_read_again = spec.shares, is_read_again
        self._adds_plainly = after is None and spec.multiplier == 1.0

    def read(self, stream: Stream) -> torch.Tensor:
        """Return what the half computes on, [T, E]."""
        if self._shares:
            return stream.read_again()
        if self._before is None:
            return stream.whole()
        return stream.normed(self._before, again=self._is_read_again)

    def add(self, stream: Stream, linear: Linear, x: torch.Tensor) -> None:
        """Add the product of x to the stream."""
        if not self._adds_plainly:
            self.add_value(stream, linear(x))
            return
        stream.plus(linear, x)
        if self._scalar is not None:
            stream.times(self._scalar)

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
