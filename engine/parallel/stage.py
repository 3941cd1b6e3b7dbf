"""One process's place among those that compute a range of a model's layers each, and the rings of shared memory between them.

A stage gets rows of the stage before and hands them to the next one; the last one sends logits to the first, which samples.
A ring has a bounded number of slots. Its writer waits for a free one, its reader for a written one, so passes follow one
another through the stages, each in another.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.parallel.group import RankLostError
from engine.parallel.layout import LINE, MESSAGE, PIECE, READ, SIZE, SLOT_BYTES, SLOTS, WRITTEN, ring_slots_from

WaitUntil = Callable[[Callable[[], bool]], None]  # returns once it is so, or raises RankLostError


class Lane(Protocol):
    """One end of what brings tensors from a stage to the next one, in order. One thread at a time writes, one reads.

    `wait_until` waits as long as the other end lives.
    """

    wait_until: WaitUntil

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor, as soon as there is room. Raises RankLostError."""
        ...

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Write the next tensor, which has the shape and dtype of this one, there. Raises RankLostError."""
        ...

    def give_up(self) -> None:
        """Let go on what waits on a device for the other end, which is lost. What it computes is wrong."""
        ...


class Ring:
    """A ring between hosts, which wait for one another: see `Lane`."""

    def __init__(self, memory: mmap.mmap, start: int, wait_until: WaitUntil) -> None:
        """`memory` is zeroed at first."""
        self._words = memoryview(memory)[start : start + 2 * LINE].cast("q")
        begins = ring_slots_from(start)
        self._heads = [memoryview(memory)[begin - LINE : begin].cast("q") for begin in begins]
        self._slots = [torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=SLOT_BYTES) for begin in begins]
        self.wait_until = wait_until
        self._message = 0
        self._fence = threading.Lock()

    def send(self, tensor: torch.Tensor) -> None:
        """See `Lane.send`."""
        self._message += 1
        lanes = tensor.contiguous().view(-1).view(torch.uint8)
        for piece in pieces_of(lanes):
            self.wait_until(self._has_room)
            number = self._words[WRITTEN]
            head = self._heads[number % SLOTS]
            head[MESSAGE], head[SIZE], head[PIECE] = self._message, len(lanes), len(piece)
            self._slots[number % SLOTS][: len(piece)].copy_(piece)
            with self._fence:  # the piece is written before the number is
                self._words[WRITTEN] = number + 1

    def _has_room(self) -> bool:
        return self._words[WRITTEN] - self._words[READ] < SLOTS

    def _has_more(self) -> bool:
        return self._words[WRITTEN] > self._words[READ]

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Lane.receive`."""
        self._message += 1
        lanes = tensor.view(-1).view(torch.uint8)
        for piece in pieces_of(lanes):
            self.wait_until(self._has_more)
            number = self._words[READ]
            head = self._heads[number % SLOTS]
            if (head[MESSAGE], head[SIZE]) != (self._message, len(lanes)):
                raise RankLostError(
                    f"a stage has message {head[MESSAGE]} of {head[SIZE]} bytes for the next one, which waits for message"
                    f" {self._message} of {len(lanes)}: they are out of step"
                )
            piece.copy_(self._slots[number % SLOTS][: len(piece)])
            with self._fence:  # it is read before the slot is free
                self._words[READ] = number + 1
        return tensor

    def give_up(self) -> None:
        """See `Lane.give_up`: on a host nothing does."""


def pieces_of(lanes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of what fits into a slot; an empty message is an empty piece."""
    return lanes.split(SLOT_BYTES) if len(lanes) else (lanes,)


@dataclass(slots=True, eq=False)
class Stage:
    """The place of a process, and its ends of the rings from the stage before and to the next one."""

    number: int = 0
    count: int = 1
    before: Lane | None = None
    after: Lane | None = None
    is_apart: bool = False  # see `apart`

    @property
    def place(self) -> tuple[int, int]:
        """Its number among so many."""
        return self.number, self.count

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context manager: nothing is sent, and zeros are received, while each stage compiles and captures by itself."""
        self.is_apart = True
        try:
            yield
        finally:
            self.is_apart = False

    def send(self, rows: torch.Tensor) -> None:
        """Hand rows to the next stage, or the last one's logits to the first. Raises RankLostError."""
        assert self.after is not None, "there are several"
        if not self.is_apart:
            self.after.send(rows)

    def receive(self, rows: torch.Tensor) -> torch.Tensor:
        """Fill in the rows of the stage before, or the first one the last one's logits. Raises RankLostError."""
        assert self.before is not None, "there are several"
        return rows.zero_() if self.is_apart else self.before.receive(rows)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a device's work, which needs all stages. Raises RankLostError: it goes on then, with wrong numbers."""
        assert self.before is not None, "there are several"
        try:
            self.before.wait_until(is_so)
        except RankLostError:
            for lane in (self.before, self.after):
                if lane is not None:
                    lane.give_up()
            raise


ONLY_STAGE = Stage()
