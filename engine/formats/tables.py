"""Tables of embeddings, and heads that share them. T tokens, V vocabulary, E features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.formats.dense import Dense
from engine.formats.product import Linear
from engine.kernels.embedding import InputTokens, embed
from engine.weights.parameters import Parameter, Weights


class Table(Protocol):
    """A row of features for each token."""

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        """Return [T, E], see `embed`."""
        ...

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        """Return the product [T, E] -> [T, V] with the table and a bias [V]."""
        ...


class TableFormat(Protocol):
    """The storage format of a table. A frozen value."""

    def declare(self, parameter: Parameter, weights: Weights) -> Table: ...


@dataclass(frozen=True, slots=True)
class PlainTable:
    weight: torch.Tensor  # [V, E]

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        return embed(self.weight, tokens)

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        dense = Dense(self.weight, bias)
        weights.when_loaded.append(dense.pack)
        return dense


@dataclass(frozen=True, slots=True)
class PlainTables:
    """Tables in the compute dtype."""

    def declare(self, parameter: Parameter, weights: Weights) -> Table:
        return PlainTable(weights.new(parameter))


PLAIN_TABLES = PlainTables()
