"""The inputs of a pass, one behind the other. T computed tokens of all texts, S all of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.pooling.prefixes import Sharing
from engine.pooling.sending import sent

Numbers = npt.NDArray[np.int32]
# Rows of `Texts.numbers`. Behind them are two for each sight.
TOKENS, POSITIONS, PLACES, TYPES, SIGHTS = range(5)


@dataclass(frozen=True, slots=True)
class Sight:
    """The part of their text that a layer's tokens see."""

    reach: int  # positions on each side; 0: all
    is_causal: bool


def num_rows(sights: Sequence[Sight]) -> int:
    """Rows of `Texts.numbers`."""
    return SIGHTS + 2 * len(sights)


@dataclass(frozen=True, slots=True)
class Texts:
    """The inputs of a pass: those of one length stand side by side, so that attention may take them at once."""

    # [rows, T and up to 3 more] int32: tokens; positions, from 0 in each text; places, from 0 on; types, 0 or 1; and of each
    # sight the first key in S that a token sees, and the one behind its last.
    numbers: torch.Tensor
    count: int  # T
    lengths: tuple[int, ...]  # (): not known, in a captured pass
    has_types: bool = False
    seen: tuple[int, ...] | None = None  # first tokens of each text that its others see; None: all
    sharing: Sharing | None = None  # None: every token is computed
    sights: tuple[Sight, ...] = ()
    # Number of texts, their length, and how many of their tokens are seen, in order.
    runs: tuple[tuple[int, int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        runs = list[tuple[int, int, int]]()
        for length, seen in zip(self.lengths, self.seen or self.lengths, strict=True):
            count = runs.pop()[0] if runs and runs[-1][1:] == (length, seen) else 0
            runs.append((count + 1, length, seen))
        object.__setattr__(self, "runs", tuple(runs))

    @property
    def tokens(self) -> torch.Tensor:
        return self.numbers[TOKENS, : self.count]

    @property
    def positions(self) -> torch.Tensor:
        return self.numbers[POSITIONS, : self.count]

    @property
    def places(self) -> torch.Tensor:
        return self.numbers[PLACES, : self.count]

    @property
    def type_numbers(self) -> torch.Tensor:
        return self.numbers[TYPES, : self.count]

    @property
    def types(self) -> torch.Tensor | None:
        """None: all 0."""
        return self.type_numbers if self.has_types else None

    def seen_by(self, sight: Sight) -> torch.Tensor:
        """Return [2, T], see `numbers`."""
        at = SIGHTS + 2 * self.sights.index(sight)
        return self.numbers[at : at + 2, : self.count]

    def are_alike(self, reach: int) -> bool:
        """True if all are computed whole, are equally long, and each token is within reach of all of its text."""
        is_whole = self.seen is None and (self.sharing is None or self.sharing.sources is None)
        return is_whole and len(self.runs) == 1 and (not reach or self.runs[0][1] <= reach + 1)

    def on(self, device: torch.device) -> Texts:
        """Return the same on a device; the host doesn't wait for it."""
        if device.type == "cpu":
            return self
        sharing = None if self.sharing is None else self.sharing.on(device)
        return replace(self, numbers=sent(self.numbers, device), sharing=sharing)

    @classmethod
    def of(
        cls,
        inputs: Sequence[Sequence[int]],
        seconds: Sequence[int],
        *,
        seen: Sequence[int] | None = None,
        sharing: Sharing | None = None,
        sights: Sequence[Sight] = (),
    ) -> Texts:
        """On the host. `seconds`: where the second text of each input begins; 0: nowhere."""
        lengths = np.array([len(one) for one in inputs], dtype=np.int32)
        begins = np.array((0,) * len(inputs) if sharing is None else sharing.begins, dtype=np.int32)
        counts = lengths - begins
        ends = np.cumsum(lengths, dtype=np.int32)
        keys = ends - lengths  # a text's first token in S
        rows = np.cumsum(counts, dtype=np.int32) - counts
        # Kernels expect numbers at multiples of 16 bytes.
        count = int(counts.sum())
        padded = np.empty((num_rows(sights), -(-count // 4) * 4), dtype=np.int32)
        numbers = padded[:, :count]
        tokens = array("I")
        for one, begin in zip(inputs, begins.tolist(), strict=True):
            tokens.fromlist(one if isinstance(one, list) and not begin else list(one[begin:]))
        numbers[TOKENS] = np.frombuffer(tokens, dtype=np.int32)
        places = np.arange(count, dtype=np.int32)
        numbers[PLACES] = places
        positions = np.subtract(places, np.repeat(rows - begins, counts), out=numbers[POSITIONS])
        numbers[TYPES] = positions >= np.repeat(np.where(seconds, seconds, lengths), counts) if any(seconds) else 0
        if sights:
            first = np.repeat(keys, counts)
            last = np.repeat(ends if seen is None else keys + np.array(seen, dtype=np.int32), counts)
            for at, sight in enumerate(sights):
                numbers[SIGHTS + 2 * at : SIGHTS + 2 * at + 2] = _seen(sight, first, last, first + positions)
        return cls(
            torch.from_numpy(padded),
            count,
            tuple(lengths.tolist()),
            any(seconds),
            None if seen is None else tuple(seen),
            sharing,
            tuple(sights),
        )


def _seen(sight: Sight, first: Numbers, end: Numbers, own: Numbers) -> tuple[Numbers, Numbers]:
    if sight.reach:
        first, end = np.maximum(first, own - sight.reach), np.minimum(end, own + sight.reach + 1)
    return first, np.minimum(end, own + 1) if sight.is_causal else end
