"""The residual stream, which layers read and add to."""

from __future__ import annotations

import torch

from engine.kernels.norm import add_rms_norm
from engine.model.layers.linear import Linear
from engine.model.layers.norm import RmsNorm


class Stream:
    """The residual [T, E], and a last product still to be added.

    That is nothing, a tensor [T, E] or partial sums [P, T, E]. The next norm adds it up, because it reads the residual anyway.
    """

    __slots__ = ("_added", "_residual", "is_empty")

    def __init__(self, residual: torch.Tensor) -> None:
        self._residual = residual
        self._added: torch.Tensor | None = None
        self.is_empty = False  # no row goes on, because none is sampled

    def normed(self, norm: RmsNorm) -> torch.Tensor:
        """Add up, and return the sum's RMSNorm [T, E]: one kernel."""
        x, self._residual = add_rms_norm(self._added, self._residual, norm.weight, norm.eps)
        self._added = None
        return x

    def plus(self, linear: Linear, x: torch.Tensor) -> None:
        if self._added is not None:
            self._settle(self._added)
        self._added = linear.onto(self._residual, x)

    def add(self, added: torch.Tensor) -> None:
        """Add a sum [T, E], or its terms [P, T, E]."""
        if self._added is not None:
            self._settle(self._added)
        self._added = added

    def only(self, rows: torch.Tensor | None) -> None:
        """Go on with these rows alone, [R] int32; None: no rows."""
        if rows is None:
            self.is_empty = True
            return
        if self._added is not None:
            self._added = self._added.index_select(-2, rows)
        self._residual = self._residual.index_select(0, rows)

    def _settle(self, added: torch.Tensor) -> None:
        if added.dim() > self._residual.dim():
            added = added.sum(dim=0)
        self._residual = self._residual + added.to(self._residual.dtype)
