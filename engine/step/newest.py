"""Sampled tokens that may only be on the device yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.sequence import Sequence


class NewestTokens:
    """The tokens sampled by one pass: `tensor` [R] int64 on the device, one row for each sequence."""

    def __init__(self, tensor: torch.Tensor, sequences: Iterable[Sequence] = ()) -> None:
        self.tensor = tensor
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}

    @classmethod
    def none(cls, device: torch.device | str, sequences: Iterable[Sequence] = ()) -> NewestTokens:
        """The value before the first pass, or after one that sampled nothing."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device), sequences)

    def of(self, tensor: torch.Tensor) -> NewestTokens:
        """The same sequences' tokens of another pass."""
        newest = NewestTokens(tensor)
        newest._rows = self._rows
        return newest

    def row_of(self, sequence: Sequence) -> int | None:
        return self._rows.get(sequence)
