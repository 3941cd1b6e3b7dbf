"""A follower's passes in later stages: each is sampled, read and guessed behind once, and in order."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from engine.batch.layout import Packed, PassSize, SinglesSize
from engine.staged import Arrived
from engine.step.later import LaterPasses

AFTER = np.zeros((2, 1), dtype=np.int32)


class Drafter:
    """A drafter that says what it is given."""

    def __init__(self) -> None:
        self.said = list[Any]()

    def taken(self, runner: Any, packed: Packed) -> int:
        return packed.size.tokens

    def read_taken(self, runner: Any, taken: int, arrived: torch.Tensor, after: Any) -> str:
        self.said.append(("reads", taken, len(arrived)))
        return f"rows of {taken}"

    def repeat(self, runner: Any, guessing: bytes, read: str) -> None:
        self.said.append(("guesses", guessing, read))


def _launched(later: LaterPasses, number: int, drafter: Drafter | None, *, sampled: int = 1) -> None:
    """A pass of as many tokens as its number."""
    size = PassSize(tokens=number, num_sampled=sampled, sampled_rows=0, attention=(), decode=SinglesSize())
    arriving = Future[Arrived]()
    arriving.set_result(Arrived(torch.full((sampled, 4), float(number)), torch.zeros(number, 8)))
    runner: Any = None
    later.launched(number, Packed.empty(size), arriving, runner, drafter)


def test_passes_are_read_and_sampled_in_order() -> None:
    later, drafter = LaterPasses(), Drafter()
    runner: Any = None
    for number in (1, 2, 3):
        _launched(later, number, drafter, sampled=int(number != 2))
    assert not later.read(2, AFTER, runner, drafter)
    assert not later.guess(1, b"", runner, drafter)
    assert not later.samples(3)
    assert later.samples(1)
    assert later.logits().tolist() == [[1.0] * 4]
    assert later.samples(3), "the second one samples nothing"
    assert later.read(1, AFTER, runner, drafter)
    assert not later.read(1, AFTER, runner, drafter)
    assert not later.guess(2, b"", runner, drafter)
    assert later.guess(1, b"a", runner, drafter)
    assert not later.guess(1, b"a", runner, drafter)
    assert later.read(2, AFTER, runner, drafter)
    assert later.read(3, AFTER, runner, drafter)
    assert not later.guess(2, b"b", runner, drafter), "it is over"
    assert drafter.said == [("reads", 1, 1), ("guesses", b"a", "rows of 1"), ("reads", 2, 2), ("reads", 3, 3)]
    assert later.are_some
    assert later.logits().tolist() == [[3.0] * 4]
    assert not later.are_some


def test_without_a_drafter_passes_are_sampled_alone() -> None:
    later = LaterPasses()
    _launched(later, 1, None, sampled=0)
    assert not later.are_some
    _launched(later, 2, None)
    assert later.samples(2)
    assert later.logits().tolist() == [[2.0] * 4]
    assert not later.are_some
