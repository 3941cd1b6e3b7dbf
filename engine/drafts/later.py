"""Drafting behind a pass on several stages: it has samples and hidden states only when later passes were launched.

The first stage drafts behind it then, by what it kept of the pass, between passes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.arrays import Ints
from engine.batch.layout import Packed
from engine.drafts.drafted import DraftedPass
from engine.drafts.heads import Rows
from engine.drafts.places import Following, Guessing, Start, ends_of, places_of
from engine.passes import Finished, Pass, Sampled
from engine.sampling.readback import Readback
from engine.sequence import Chunk
from engine.step.runner import Runner


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a pass on several stages that is kept until it is read."""

    packed: Packed
    kept: torch.Tensor  # [T, ..]: the hidden states of this stage's layers
    ids: torch.Tensor | None  # [T] int64: its tokens, for a draft model


class Leading(Protocol):
    """The way to other ranks: they are told what to compute behind a pass, by its number, before this one does."""

    @property
    def number(self) -> int:
        """The newest pass's."""
        ...

    def tell_reading(self, number: int, after: Ints) -> None: ...

    def tell_guessing(self, number: int, guessing: Guessing) -> None: ...

    def turn(self) -> AbstractContextManager[object]:
        """Context manager: no other thread launches anything of the model's or the drafter's meanwhile."""
        ...


class Drafts(Protocol):
    """The chain that drafts, see `DraftChain`."""

    @property
    def leading(self) -> Leading: ...

    def read_taken(self, runner: Runner, taken: Taken, arrived: torch.Tensor, after: Ints) -> Rows: ...

    def guessing(self, starts: list[Start], tables: Ints) -> Guessing: ...

    def guess(self, runner: Runner, guessing: Guessing, read: Rows) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Later:
    """Drafting behind a pass that is still in a later stage."""

    chain: Drafts
    runner: Runner
    chunks: list[Chunk]
    ordered: SequenceOf[Chunk]
    following: Following
    # Those from which sequences may go on, by their chunk's number in that order; and their blocks [W].
    starts: dict[int, Start]
    tables: dict[int, Ints]
    number: int  # the pass's
    taken: Taken

    @torch.inference_mode()
    def drafted(self, results: list[Sampled | None], arrived: torch.Tensor) -> Pass:
        """Return the pass, whose results have drafts. `arrived` [T, ..]: hidden states of the other stages' layers.

        Raises RankLostError.
        """
        chain, found = self.chain, dict(zip(self.chunks, results, strict=True))
        in_order = [found[chunk] for chunk in self.ordered]
        after = self.following.known(self.ordered, in_order)
        ends = (at for at, _ in ends_of(self.ordered, in_order) if at in self.starts)
        numbers = sorted(ends, key=lambda at: -self.starts[at].room)
        starts = [self.starts[at] for at in numbers]
        with chain.leading.turn():
            chain.leading.tell_reading(self.number, after)
            read = chain.read_taken(self.runner, self.taken, arrived, after)
            if not starts:
                return Finished(results)
            guessing = chain.guessing(starts, np.stack([self.tables[at] for at in numbers]))
            chain.leading.tell_guessing(self.number, guessing)
            guessed = Readback(chain.guess(self.runner, guessing, read))
        return DraftedPass(Finished(results), self.chunks, places_of(starts), guessed).finished()
