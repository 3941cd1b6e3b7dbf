"""The residual stream that layers read and add to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.formats.forms import PLAIN, InputForm, Rows, summed
from engine.formats.product import Linear
from engine.model.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class Lent:
    """A layer's keys and values for later layers that attend to them."""

    product: torch.Tensor | None  # set if attention reads keys and values there
    factors: torch.Tensor | None


class Stream:
    """The residual [T, E], and a pending product still to be added.

    That is nothing, a tensor [T, E] or partial sums [P, T, E]. The next norm adds it up, because it reads the residual anyway.
    """

    __slots__ = ("_added", "_read", "_residual", "is_empty", "layer_inputs", "lent", "selected", "shortcut", "streams")

    def __init__(self, residual: torch.Tensor) -> None:
        self._residual = residual
        self._added: torch.Tensor | None = None
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
        return summed(self._added, self._residual)

    def plus(self, linear: Linear, x: Rows) -> None:
        """Add the product of rows, which are plain or in its form."""
        self._settle()
        self._added = linear.onto(self._residual, x)

    def add(self, added: torch.Tensor) -> None:
        """Add a sum [T, E], or its terms [P, T, E]."""
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
