"""The inputs of a pass, one behind the other. T computed tokens of all texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.pooling.prefixes import Sharing


@dataclass(frozen=True, slots=True)
class Texts:
    """The inputs of a pass: those of one length stand side by side, so that attention takes them at once."""

    tokens: torch.Tensor  # [T]
    types: torch.Tensor | None  # [T]; None: all 0
    positions: torch.Tensor  # [T] int32, from 0 in each text
    lengths: tuple[int, ...]
    seen: tuple[int, ...] | None = None  # first tokens of each text that its others see; None: all
    sharing: Sharing | None = None  # None: every token is computed
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
        sharing: Sharing | None = None,
    ) -> Texts:
        """`seconds`: where the second text of each input begins; 0: nowhere."""
        lengths = tuple(map(len, inputs))
        begins = (0,) * len(lengths) if sharing is None else sharing.begins
        spans = list(zip(inputs, begins, strict=True))
        tokens = torch.tensor([token for one, begin in spans for token in one[begin:]], dtype=torch.long)
        positions = torch.cat([torch.arange(begin, len(one), dtype=torch.int32) for one, begin in spans])
        types = None
        if any(seconds):
            ends = [second or length for second, length in zip(seconds, lengths, strict=True)]
            types = torch.cat(
                [(torch.arange(begin, len(one)) >= end).long() for (one, begin), end in zip(spans, ends, strict=True)]
            ).to(device)
        first = None if seen is None else tuple(seen)
        return cls(tokens.to(device), types, positions.to(device), lengths, first, sharing)
