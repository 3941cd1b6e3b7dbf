"""The rows that a stage's passes read and hand on, outside of what graphs capture."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.batch.batch import ForwardBatch
from engine.batch.layout import GraphSize, PassSize
from engine.parallel.stage import Stage
from engine.step.graphs import logits_of, results_of


class Between:
    """A stage's passes and its neighbours. T tokens, padded as in the graph; E hidden size; R sampled rows; V vocabulary."""

    def __init__(self, stage: Stage, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stage = stage
        self._captured = torch.zeros(0, hidden_size, dtype=dtype, device=device)  # what graphs read, the largest one's

    @classmethod
    def of(cls, stage: Stage, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Between | None:
        """None for a single stage, whose passes are the model's."""
        return None if stage.count == 1 else cls(stage, hidden_size, dtype, device)

    def results(self, size: GraphSize) -> tuple[int, int]:
        """See `results_of`: all but the last stage's are rows."""
        rows = results_of(size)
        return rows if self._stage.is_last else rows[::-1]

    def reserve(self, num_rows: int) -> None:
        """Have room for the rows that a graph of so many tokens reads; before the first one is captured."""
        if self._stage.number and num_rows > len(self._captured):
            self._captured = self._captured.new_zeros(num_rows, self._captured.shape[1])

    def captured(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch of a graph with the rows that it reads."""
        if not self._stage.number:
            return batch
        return replace(batch, rows=self._captured[: len(batch.positions)])

    def receive(self, size: PassSize) -> torch.Tensor | None:
        """Get the rows [T, E] of the stage before, where the pass's graph reads them if it has one. Raises RankLostError."""
        if not self._stage.number:
            return None
        rows = self._captured
        rows = rows.new_empty(size.tokens, rows.shape[1]) if size.graph is None else rows[: size.tokens]
        return self._stage.receive(rows)

    def hand_on(self, results: torch.Tensor | None, size: PassSize) -> torch.Tensor | None:
        """Give the next stage the rows [T, E], or the first one the logits [R, V]; return logits. Raises RankLostError.

        Without logits that is an empty message: it says that all stages have written their KV.
        """
        if not self._stage.is_last:
            assert results is not None, "all rows go on"
            self._stage.send(results[: size.tokens])
            return None
        logits = logits_of(results, size)
        self._stage.send(self._captured[:0] if logits is None else logits)
        return logits
