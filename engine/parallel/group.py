"""A tensor-parallel group, as layers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class RankLostError(RuntimeError):
    """A rank ended, hangs or is out of step. No further pass of its group can be computed."""


def sent_nothing(missing: object, rank: int) -> str:
    """The words about a rank, or several, that another one's device waited for in vain."""
    return f"rank {missing} sent nothing to rank {rank} in time: what was computed since is wrong"


class Group(Protocol):
    """The ranks that compute one model together, seen by one of them.

    All ranks call the same operations in the same order. A sum is added in rank order, so that every rank gets the same bits
    and takes the same choices. Both raise RankLostError.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `partial`, in float32 and rounded once to its dtype."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's columns [R, N] side by side, [R, size N]."""
        ...

    def meet(self) -> None:
        """Wait until every rank has come here, as before the first pass: however long it loads, while it lives."""
        ...

    def check(self) -> None:
        """Raise RankLostError, naming the rank, if one did not come and what was computed since is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The group of a single rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def meet(self) -> None: ...

    def check(self) -> None: ...


ALONE = Alone()
