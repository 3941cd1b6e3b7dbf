"""The inputs of a pass, one behind the other. T tokens of all texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Texts:
    """The inputs of a pass: those of one length stand side by side, so that attention takes them at once."""

    tokens: torch.Tensor  # [T]
    types: torch.Tensor | None  # [T]; None: all 0
    positions: torch.Tensor  # [T] int32, from 0 in each text
    lengths: tuple[int, ...]
    seen: tuple[int, ...] | None = None  # first tokens of each text that its others see; None: all
    places: torch.Tensor = field(init=False)  # [T] int32, from 0 on
    # Number of texts, their length, and how many of their tokens are seen, in order.
    runs: tuple[tuple[int, int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        runs = list[tuple[int, int, int]]()
        for length, seen in zip(self.lengths, self.seen or self.lengths, strict=True):
            count = runs.pop()[0] if runs and runs[-1][1:] == (length, seen) else 0
            runs.append((count + 1, length, seen))
        object.__setattr__(self, "runs", tuple(runs))
        places = torch.arange(len(self.tokens), dtype=torch.int32, device=self.tokens.device)
        object.__setattr__(self, "places", places)

    @classmethod
    def of(
        cls,
        inputs: Sequence[Sequence[int]],
        seconds: Sequence[int],
        device: torch.device,
        *,
        seen: Sequence[int] | None = None,
    ) -> Texts:
        """`seconds`: where the second text of each input begins; 0: nowhere."""
        lengths = tuple(map(len, inputs))
        tokens = torch.tensor([token for one in inputs for token in one], dtype=torch.long)
        positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
        types = None
        if any(seconds):
            begins = [begin or length for begin, length in zip(seconds, lengths, strict=True)]
            types = torch.cat([(torch.arange(n) >= b).long() for b, n in zip(begins, lengths, strict=True)]).to(device)
        return cls(tokens.to(device), types, positions.to(device), lengths, None if seen is None else tuple(seen))
