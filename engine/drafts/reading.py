"""A head's part of a pass: the keys and values of the pass's rows, in one launch where the pass itself is captured.

Kernel by kernel it takes the host longer than the device, which a small model's pass does not hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.batch.batch import ForwardBatch
from engine.batch.layout import GraphSize
from engine.drafts.heads import BlockHead, DraftHead, Rows, known_alone
from engine.kernels.embedding import InputTokens
from engine.spec.model import DraftSpec
from engine.step.runner import Runner


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the memory that it reads tokens from, and what it leaves. A draft model's `batch` has tokens of its own."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    after: torch.Tensor  # [2, T] int32: the tokens after them, see `InputTokens`
    rows: Rows


class Reading:
    """A head's reads, captured by size of pass. One thread at a time."""

    def __init__(self, head: DraftHead | BlockHead, kept: Sequence[Any], reads: DraftSpec) -> None:
        """`kept`: the head's views of the pool."""
        self._head, self._kept, self._is_model = head, kept, reads.is_model
        self._captured: dict[GraphSize, _Captured] = {}

    def __call__(self, after: torch.Tensor, batch: ForwardBatch, size: GraphSize | None) -> Rows:
        """Write the keys and values of a pass of this size, see `Drafter.read`. The next call overwrites captured ones.

        `after` [2, T] int32: the known tokens after each row, and their rows among the pass's samples.
        """
        captured = None if size is None else self._captured.get(size)
        if captured is None:
            return self._read(after, batch)
        captured.after.copy_(after, non_blocking=True)
        if self._is_model:
            captured.batch.tokens.known.copy_(batch.tokens.known)
        captured.graph.replay()
        return captured.rows

    def rehearse(self, runner: Runner, sizes: Iterable[GraphSize]) -> None:
        """Launch kernel by kernel what `capture` will capture."""
        for _, batch in runner.empty_passes(_decoding(sizes)):
            self._read(_none_after(batch), self._standing_in(batch))

    def capture(self, runner: Runner, sizes: Iterable[GraphSize]) -> None:
        """Capture what passes without prompts leave."""
        for size, batch in runner.empty_passes(_decoding(sizes)):
            after, batch = _none_after(batch), self._standing_in(batch)
            found = [self._read(after, batch)]  # the first of a kind does more than launch

            def run(after: torch.Tensor = after, batch: ForwardBatch = batch, found: list[Rows] = found) -> None:
                found[:] = [self._read(after, batch)]

            graph = runner.graphs.captures.capture(run)
            self._captured[size] = _Captured(graph, batch, after, *found)

    def forget_graphs(self) -> None:
        """Drop what was captured."""
        self._captured.clear()

    def _read(self, after: torch.Tensor, batch: ForwardBatch) -> Rows:
        known, sources = after
        return self._head.read(InputTokens(known, sources, batch.tokens.newest), batch, self._kept)

    def _standing_in(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with tokens of its own, if the head reads the rows' tokens: the pass will have sampled by then."""
        return replace(batch, tokens=known_alone(batch.tokens.ids(), batch)) if self._is_model else batch


def _decoding(sizes: Iterable[GraphSize]) -> list[GraphSize]:
    return [size for size in sizes if not size.prompts]


def _none_after(batch: ForwardBatch) -> torch.Tensor:
    """Tokens [2, T] int32 after the rows of an empty pass."""
    after = torch.zeros((2, len(batch.positions)), dtype=torch.int32, device=batch.positions.device)
    after[1] = -1
    return after
