"""The seam between a chain of guesses and the heads that make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.batch.batch import ForwardBatch
from engine.kernels.attention import HeadShape
from engine.kernels.embedding import InputTokens
from engine.model.decoder import Decoder
from engine.spec.model import DraftSpec


class Rows(Protocol):
    """A head's rows of a pass, whose keys and values are in the pool."""

    def at(self, rows: torch.Tensor, sampled: torch.Tensor) -> Any:
        """Some of them, int64: by their rows of the pass, which are also those with these numbers among the sampled ones."""


class DraftHead(Protocol):
    """A head with weights. One thread at a time.

    `kept`: its layer's views of the pool. T rows, E hidden size.
    """

    def load(self) -> None:
        """Read the weights that aren't the model's. Raises CheckpointError."""

    def read(self, tokens: InputTokens, batch: ForwardBatch, kept: Sequence[Any]) -> Rows:
        """Write the keys and values of all rows of the target's pass; `tokens` are those after each row."""

    def read_on(self, ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, kept: Sequence[Any]) -> Any:
        """Write the keys and values of guessed tokens [T] int64, and return their rows; `hidden` [T, E] from `guess`."""

    def guess(self, rows: Any, batch: ForwardBatch, kept: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens behind the rows [T] int64, and what the next step reads [T, E]."""


class HeadSpec(Protocol):
    """A head before it has weights."""

    @property
    def in_pool(self) -> DraftSpec:
        """Its layers, and what it reads."""

    @property
    def heads(self) -> HeadShape:
        """The shape of its attention."""

    def head(self, decoder: Decoder, max_model_len: int) -> DraftHead:
        """Declare the head of this decoder, whose weights come later."""
