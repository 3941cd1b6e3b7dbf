"""The guesses behind a pass: in one launch where a graph was captured for so many sequences, else kernel by kernel.

S sequences, the one with the most room first; K tokens of a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.arrays import Ints, Longs
from engine.batch.batch import ForwardBatch
from engine.drafts.heads import BlockHead, DraftHead
from engine.spec.model import DraftSpec
from engine.step.chained import Chained, Queries
from engine.step.graphs import replay_ms
from engine.step.limits import HeadLimits
from engine.step.runner import Runner


@dataclass(frozen=True, slots=True)
class Ends:
    """The sequences' places."""

    tables: Ints  # [S, W]: their blocks
    ends: Longs  # [S]: positions of the pass that they sampled in
    rooms: list[int]  # tokens to draft, the most first


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, where it reads its anchors, and where it leaves its guesses."""

    graph: torch.cuda.CUDAGraph
    layout: Chained
    anchors: Any
    guessed: torch.Tensor  # [S, K] int64


class Guesses:
    """A drafter's guesses. One thread at a time."""

    def __init__(
        self,
        head: DraftHead | BlockHead,
        kept: Sequence[Any],
        heads: tuple[HeadLimits, ...],
        *,
        num_drafts: int,
        reads: DraftSpec,
    ) -> None:
        """`num_drafts`: most tokens of a draft. `kept`: the head's views of the pool."""
        self._head, self._kept, self._heads = head, kept, heads
        self._num_drafts, self._ahead = num_drafts, reads.ahead
        self._captured: dict[int, _Captured] = {}

    def __call__(self, runner: Runner, ends: Ends, anchors: Any) -> torch.Tensor:
        """Guess [S, steps] int64, of which a sequence's first `rooms` count. Overwritten by the next call.

        `anchors`: the last of their rows, see `Rows.at`.
        """
        count = next((count for count in sorted(self._captured) if count >= len(ends.rooms)), 0)
        if count and (guessed := self._replayed(self._captured[count], runner, ends, anchors)) is not None:
            return guessed
        passes = self._passes(ends)

        def inputs(number: int) -> ForwardBatch:
            its = passes[number]
            return runner.singles(ends.tables[its.sequences], its.ends, self._heads, seen=its.seen)

        return self._guessed(anchors, ends.rooms, inputs)

    def rehearse(self, runner: Runner, counts: Iterable[int], anchors: Callable[[int], Any]) -> None:
        """Launch kernel by kernel what `capture` will capture."""
        for count, _, batches in self._empty(runner, counts):
            self._guessed(anchors(count), [self._num_drafts] * count, batches.__getitem__)

    def capture(self, runner: Runner, counts: Iterable[int], anchors: Callable[[int], Any]) -> dict[int, float]:
        """Capture the guesses of so many sequences; return their milliseconds, without contexts.

        `anchors` of so many have any values.
        """
        times = {}
        for count, layout, batches in self._empty(runner, counts):
            own, rooms = _copied(anchors(count)), [self._num_drafts] * count
            guessed = self._guessed(own, rooms, batches.__getitem__)  # the first of a kind does more than launch

            def run(own: Any = own, batches: list[ForwardBatch] = batches, guessed: torch.Tensor = guessed) -> None:
                guessed.copy_(self._guessed(own, [self._num_drafts] * len(guessed), batches.__getitem__))

            graph = runner.graphs.captures.capture(run)
            self._captured[count] = _Captured(graph, layout, own, guessed)
            times[count] = replay_ms(graph)
        return times

    def forget_graphs(self) -> None:
        """Drop what was captured."""
        self._captured.clear()

    def _empty(self, runner: Runner, counts: Iterable[int]) -> Iterator[tuple[int, Chained, list[ForwardBatch]]]:
        """Inputs without queries, the largest first."""
        passes = len(self._head.sights) if isinstance(self._head, BlockHead) else self._num_drafts
        for count in sorted(counts, reverse=True):
            rows = count * self._width if isinstance(self._head, BlockHead) else count
            layout = Chained(self._heads, rows=rows, passes=passes, block_size=runner.limits.block_size)
            if (batches := runner.batches_of(layout)) is not None:
                yield count, layout, batches

    def _replayed(self, captured: _Captured, runner: Runner, ends: Ends, anchors: Any) -> torch.Tensor | None:
        passes = self._passes(ends, width=self._width)
        if not runner.send(captured.layout, passes, ends.tables):
            return None
        for own, theirs in zip(_tensors(captured.anchors), _tensors(anchors), strict=True):
            own[: len(theirs)].copy_(theirs)
        captured.graph.replay()
        return captured.guessed[: len(ends.rooms)]

    @property
    def _width(self) -> int:
        """Rows of a whole block."""
        return self._num_drafts + self._ahead - min(self._ahead, 1)

    def _guessed(self, anchors: Any, rooms: list[int], inputs: Callable[[int], ForwardBatch]) -> torch.Tensor:
        if isinstance(self._head, BlockHead):
            sights = list(self._head.sights)
            return self._head.guess_blocks(anchors, rooms, lambda sight: inputs(sights.index(sight)), self._kept)
        rows, ids, hidden = anchors, torch.empty(0), torch.empty(0)
        guessed: torch.Tensor | None = None
        for step in range(rooms[0]):
            count, batch = sum(room > step for room in rooms), inputs(step)
            if step:
                rows = self._head.read_on(ids[:count], hidden[:count], batch, self._kept)
            ids, hidden = self._head.guess(rows, batch, self._kept)
            if guessed is None:
                guessed = ids.new_zeros((len(rooms), rooms[0]))
            guessed[:count, step] = ids
        assert guessed is not None, "the first has room"
        return guessed

    def _passes(self, ends: Ends, *, width: int = 0) -> list[Queries]:
        """The rows of each pass. `width`: of all blocks; 0: they follow each other without a gap."""
        if not isinstance(self._head, BlockHead):
            return [self._step(ends, step) for step in range(ends.rooms[0])]
        # A block's first row is the pass's last, or else the sampled token's behind it.
        behind = min(self._ahead, 1)
        widths = np.array(ends.rooms, dtype=np.int64) + self._ahead - behind
        sequences = np.repeat(np.arange(len(widths)), widths)
        place = np.arange(len(sequences)) - (np.cumsum(widths) - widths)[sequences]
        rows = sequences * width + place if width else np.arange(len(sequences))
        first = ends.ends[sequences] + behind
        own, whole = first + place, first + widths[sequences] - 1
        return [Queries(rows, sequences, own, own if is_causal else whole) for is_causal in self._head.sights]

    def _step(self, ends: Ends, step: int) -> Queries:
        rows = np.arange(sum(room > step for room in ends.rooms))
        own = ends.ends[rows] + self._ahead + step
        return Queries(rows, rows, own, own)


def _tensors(anchors: Any) -> list[torch.Tensor]:
    return [anchors] if isinstance(anchors, torch.Tensor) else [each for each in anchors if each is not None]


def _copied(anchors: Any) -> Any:
    if isinstance(anchors, torch.Tensor):
        return anchors.clone()
    return type(anchors)(*(None if each is None else each.clone() for each in anchors))
