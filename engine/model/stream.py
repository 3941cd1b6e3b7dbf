"""The residual stream, which layers read and add to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.formats.int8 import Int8Linear
from engine.formats.product import Linear
from engine.kernels.quantised.fp8 import Fp8Rows, Rounding
from engine.kernels.quantised.int8 import Int8Rows
from engine.kernels.quantised.int8 import normed_rows as normed_codes
from engine.model.layers.norm import Norm, RmsNorm


@dataclass(frozen=True, slots=True)
class Lent:
    """What later layers read of a layer whose keys and values they attend to."""

    product: torch.Tensor | None  # where attention reads keys and values there
    factors: torch.Tensor | None


class Stream:
    """The residual [T, E], and a last product still to be added.

    That is nothing, a tensor [T, E] or partial sums [P, T, E]. The next norm adds it up, because it reads the residual anyway.
    """

    __slots__ = ("_added", "_read", "_residual", "chosen", "is_empty", "layer_inputs", "lent", "shortcut", "streams")

    def __init__(self, residual: torch.Tensor) -> None:
        self._residual = residual
        self._added: torch.Tensor | None = None
        self._read: torch.Tensor | None = None  # kept for the layer's other half
        self.is_empty = False  # no row goes on, because none is sampled
        self.layer_inputs: torch.Tensor | None = None  # [T, layers, size]
        self.lent: dict[str, Lent] = {}
        self.chosen: torch.Tensor | None = None  # [T, K] int32: see `chosen_positions`; None: all that a token sees
        self.shortcut: torch.Tensor | None = None  # [T, E], to be added behind a later layer
        self.streams: torch.Tensor | None = None  # all of them [S, T, E], where the model has several

    def go_on_with(self, streams: torch.Tensor, active: int) -> None:
        """Go on with one of several streams. Layers add to it outside of them."""
        self.become(streams[active])
        self.streams = streams

    def become(self, residual: torch.Tensor) -> None:
        """Go on with this one alone."""
        self._residual, self._added, self.streams = residual, None, None

    def normed(self, norm: Norm, *, again: bool = False) -> torch.Tensor:
        """Add up, and return the sum's norm [T, E]: one kernel. `again`: the layer's other half reads it too."""
        x, self._residual = norm.of_sum(self._added, self._residual)
        self._added = None
        if again:
            self._read = x
        return x

    def normed_rows(self, norm: RmsNorm, rounding: Rounding) -> Fp8Rows:
        """Add up, and return the sum's norm in 8-bit floats: one kernel."""
        rows, self._residual = norm.rows_of_sum(self._added, self._residual, rounding)
        self._added = None
        return rows

    def normed_codes(self, norm: RmsNorm, linear: Int8Linear) -> Int8Rows:
        """Add up, and return the sum's norm in whole numbers for a product."""
        self._settle()
        return normed_codes(self._residual, norm.weight, norm.eps, linear.columns, plus_one=norm.plus_one)

    @property
    def num_rows(self) -> int:
        return self._residual.shape[0]

    def read_again(self) -> torch.Tensor:
        """Return what the layer's first half has read."""
        assert self._read is not None, "the half before must say that it is read again"
        x, self._read = self._read, None
        return x

    @property
    def dtype(self) -> torch.dtype:
        return self._residual.dtype

    def whole(self) -> torch.Tensor:
        """Add up, and return the sum [T, E]."""
        self._settle()
        return self._residual

    def plus(self, linear: Linear, x: torch.Tensor) -> None:
        """Add a product."""
        self._settle()
        self._added = linear.onto(self._residual, x)

    def plus_codes(self, linear: Int8Linear, rows: Int8Rows) -> None:
        """Add a product of rows in whole numbers."""
        self._settle()
        linear.rows_onto(self._residual, rows)

    def add(self, added: torch.Tensor) -> None:
        """Add a sum [T, E], or its terms [P, T, E]."""
        self._settle()
        self._added = added

    def times(self, scalar: torch.Tensor | float) -> None:
        """Multiply all of it by a number."""
        self._settle()
        self._residual = self._residual * scalar

    def only(self, rows: torch.Tensor | None) -> None:
        """Go on with these rows alone, [R] int32; None: no rows."""
        if rows is None:
            self.is_empty = True
            return
        if self._added is not None:
            self._added = self._added.index_select(-2, rows)
        if self._read is not None:
            self._read = self._read.index_select(0, rows)
        if self.chosen is not None:
            self.chosen = self.chosen.index_select(0, rows)
        if self.layer_inputs is not None:
            self.layer_inputs = self.layer_inputs.index_select(0, rows)
        if self.shortcut is not None:
            self.shortcut = self.shortcut.index_select(0, rows)
        if self.streams is not None:
            self.streams = self.streams.index_select(1, rows)
        self._residual = self._residual.index_select(0, rows)

    def _settle(self) -> None:
        added = self._added
        if added is None:
            return
        if added.dim() > self._residual.dim():
            added = added.sum(dim=0)
        self._residual = self._residual + added.to(self._residual.dtype)
        self._added = None
