"""Products and tables that the ranks of a group share. T tokens, E hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.formats.forms import PLAIN, Added, InputForm, RankSum, Rows
from engine.formats.product import ByItsResult, KeptWhole, Linear, LinearSpec, Table, TableFormat
from engine.kernels.embedding import InputTokens
from engine.parallel.group import Group
from engine.weights.parameters import Parameter, Shard, Weights


def summed_over(linear: Linear | KeptWhole, spec: LinearSpec, group: Group) -> Linear:
    """Return a rank's product as one of the whole: where ranks share the inputs, each has a term of the sum, or all inputs."""
    if isinstance(linear, KeptWhole):
        return OfGathered(linear.linear, group)
    return Joined(linear, group.all_reduce, group) if group.size > 1 and spec.shard is Shard.INPUTS else linear


def table_of(format: TableFormat, parameter: Parameter, weights: Weights, group: Group) -> Table:
    """Declare an embedding table, of which each rank has some tokens' rows where all can have as many."""
    tokens = parameter.shape[0]
    if group.size == 1 or tokens % group.size:
        return format.declare(parameter, weights)
    count = tokens // group.size
    own = format.declare(replace(parameter, shard=Shard.OUTPUTS), weights)
    return SharedTable(own, group.rank * count, count, group)


@dataclass(frozen=True, slots=True)
class Joined(ByItsResult):
    """A product that ranks share, with every rank's results: added (`Group.all_reduce`) or side by side (`Group.gather`).

    With `added_by`, what goes onto the residual is added when it is needed: the next norm may do both at once.
    """

    linear: Linear
    join: Callable[[torch.Tensor], torch.Tensor]
    added_by: Group | None = None

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return self.linear.wants(num_rows, dtype)

    def __call__(self, x: Rows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        whole = self.join(self.linear(x))
        return whole if out is None else out.copy_(whole)

    def onto(self, residual: torch.Tensor, x: Rows) -> Added:
        return self(x) if self.added_by is None else RankSum(self.linear.parts(x), self.added_by)


@dataclass(frozen=True, slots=True)
class OfGathered:
    """A product that each rank computes whole, of inputs of which each has a share."""

    linear: Linear
    group: Group

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return PLAIN

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(self.group.gather(x), out=out)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear.parts(self.group.gather(x))

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        return self.linear.onto(residual, self.group.gather(x))

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return self.linear.gated(self.group.gather(x), activation)

    def gated_as(self, form: InputForm, x: torch.Tensor, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))


@dataclass(frozen=True, slots=True)
class SharedTable:
    """An embedding table of which this rank has `count` tokens' rows, from token `first`."""

    table: Table
    first: int
    count: int
    group: Group

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        """Return [T, E]: each row comes from the rank that has it, and zeros from the others."""
        ids = tokens.ids() - self.first
        is_here = (ids >= 0) & (ids < self.count)
        own = InputTokens.known_alone(ids * is_here, tokens.newest)
        return self.group.all_reduce(self.table.rows(own) * is_here[:, None])

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        return Joined(self.table.head(bias, weights), self.group.gather)
