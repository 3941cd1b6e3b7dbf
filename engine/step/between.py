"""The rows that a stage's passes read and hand on, outside of what graphs capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from engine.batch.batch import ForwardBatch
from engine.batch.layout import GraphSize, PassSize
from engine.parallel.stage import Stage
from engine.step.graphs import logits_of, results_of


class States(Protocol):
    """The model's hidden states that a drafter reads, see `AuxStates`."""

    @property
    def arriving(self) -> int:
        """Features of a row that stages before have."""
        ...

    def kept(self, rows: int) -> torch.Tensor:
        """The states of a pass with so many rows that this stage has computed [T, ..]."""
        ...


class Between:
    """A stage's passes and its neighbours. T tokens, padded as in the graph; E hidden size; R sampled rows; V vocabulary."""

    def __init__(
        self, stage: Stage, hidden_size: int, dtype: torch.dtype, device: torch.device, states: States | None = None
    ) -> None:
        self._stage, self._states = stage, states
        self._captured = torch.zeros(0, hidden_size, dtype=dtype, device=device)  # what graphs read, the largest one's
        self._arrived: torch.Tensor | None = None  # hidden states of stages before, of the pass that is computed

    @classmethod
    def of(
        cls, stage: Stage, hidden_size: int, dtype: torch.dtype, device: torch.device, states: States | None = None
    ) -> Between | None:
        """None for a single stage, whose passes are the model's."""
        return None if stage.count == 1 else cls(stage, hidden_size, dtype, device, states)

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
        self._stage.receive(rows)
        if self._states is not None and self._states.arriving:
            self._arrived = self._stage.receive(rows.new_empty(size.tokens, self._states.arriving))
        return rows

    def hand_on(self, results: torch.Tensor | None, size: PassSize) -> torch.Tensor | None:
        """Give the next stage the rows [T, E], or the first one the logits [R, V]; return logits. Raises RankLostError.

        Hidden states for a drafter follow.

        Without logits that is an empty message: it says that all stages have written their KV.
        """
        if not self._stage.is_last:
            assert results is not None, "all rows go on"
            self._stage.send(results[: size.tokens])
            self._hand_on_states(size.tokens)
            return None
        logits = logits_of(results, size)
        self._stage.send(self._captured[:0] if logits is None else logits)
        self._hand_on_states(size.tokens)
        return logits

    def _hand_on_states(self, num_tokens: int) -> None:
        """Send the hidden states of the stages before and of this one [T, ..], but the first one's, which it keeps itself."""
        if self._states is None or not self._stage.number:
            return
        states = self._states.kept(num_tokens)
        if self._arrived is not None:
            states, self._arrived = torch.cat((self._arrived, states), -1), None
        if states.shape[1]:
            self._stage.send(states)
