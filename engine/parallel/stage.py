"""One process's place among those that compute a range of a model's layers each, and the rings of shared memory between them.

A stage gets rows of the stage before and hands them to the next one; the last one sends logits to the first, which samples.
A ring has a bounded number of slots. Its writer waits for a free one, its reader for a written one, so passes follow one
another through the stages, each in another.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from engine.parallel.group import RankLostError

SLOTS, SLOT_BYTES = 4, 1 << 20
_LINE = 64  # bytes of a cache line
_WRITTEN, _READ = 0, _LINE // 8  # words of the ring's head: slots written, and read, since it began
_MESSAGE, _SIZE = 0, 1  # words of a slot's head: the message's number, and its bytes


class Ring:
    """One end of a ring: tensors from a stage to the next one, in order. One thread writes, one reads.

    `wait_until(is_so)` returns once it is so, or raises RankLostError.
    """

    NUM_BYTES: ClassVar[int] = 2 * _LINE + SLOTS * (_LINE + SLOT_BYTES)

    def __init__(self, memory: mmap.mmap, start: int, wait_until: Callable[[Callable[[], bool]], None]) -> None:
        """`memory` is zeroed at first."""
        self._words = memoryview(memory)[start : start + 2 * _LINE].cast("q")
        begins = [start + 2 * _LINE + slot * (_LINE + SLOT_BYTES) for slot in range(SLOTS)]
        self._heads = [memoryview(memory)[begin : begin + _LINE].cast("q") for begin in begins]
        self._slots = [
            torch.frombuffer(memory, dtype=torch.uint8, offset=begin + _LINE, count=SLOT_BYTES) for begin in begins
        ]
        self._wait_until = wait_until
        self._message = 0
        self._fence = threading.Lock()

    def send(self, tensor: torch.Tensor) -> None:
        """Write a tensor; wait for room as long as the reader lives. Raises RankLostError."""
        self._message += 1
        lanes = tensor.contiguous().view(-1).view(torch.uint8)
        for piece in _pieces(lanes):
            self._wait_until(self._has_room)
            number = self._words[_WRITTEN]
            head = self._heads[number % SLOTS]
            head[_MESSAGE], head[_SIZE] = self._message, len(lanes)
            self._slots[number % SLOTS][: len(piece)].copy_(piece)
            with self._fence:  # the piece is written before the number is
                self._words[_WRITTEN] = number + 1

    def _has_room(self) -> bool:
        return self._words[_WRITTEN] - self._words[_READ] < SLOTS

    def _has_more(self) -> bool:
        return self._words[_WRITTEN] > self._words[_READ]

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for the next tensor, which has the shape and dtype of this one, and write it there. Raises RankLostError."""
        self._message += 1
        lanes = tensor.view(-1).view(torch.uint8)
        for piece in _pieces(lanes):
            self._wait_until(self._has_more)
            number = self._words[_READ]
            head = self._heads[number % SLOTS]
            if (head[_MESSAGE], head[_SIZE]) != (self._message, len(lanes)):
                raise RankLostError(
                    f"a stage has message {head[_MESSAGE]} of {head[_SIZE]} bytes for the next one, which waits for message"
                    f" {self._message} of {len(lanes)}: they are out of step"
                )
            piece.copy_(self._slots[number % SLOTS][: len(piece)])
            with self._fence:  # it is read before the slot is free
                self._words[_READ] = number + 1
        return tensor


def _pieces(lanes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of what fits into a slot; an empty message is an empty piece."""
    return lanes.split(SLOT_BYTES) if len(lanes) else (lanes,)


@dataclass(frozen=True, slots=True)
class Stage:
    """The place of a process, and its ends of the rings from the stage before and to the next one."""

    number: int = 0
    count: int = 1
    before: Ring | None = None
    after: Ring | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Its number among so many."""
        return self.number, self.count

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def send(self, rows: torch.Tensor) -> None:
        """Hand rows to the next stage, or the last one's logits to the first. Raises RankLostError."""
        assert self.after is not None, "there are several"
        self.after.send(rows)

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Wait for the rows of the stage before, or the first one for logits. Raises RankLostError."""
        assert self.before is not None, "there are several"
        return self.before.receive(torch.empty(shape, dtype=dtype))


ONLY_STAGE = Stage()
