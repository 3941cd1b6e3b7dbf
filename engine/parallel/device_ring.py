"""A ring between stages on GPUs: memory of the host that both devices reach, and words that their streams wait for and write.

    stage 0   ... ─ copy to slot n ─ written = n + 1 ─ ...
    stage 1               (waits for written > n) ─ copy from slot n ─ read = n + 1 ─ ...

A host only puts this into its stream, so a pass is launched before what it reads is there. It needs no access between GPUs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.parallel.layout import LINE, PIECE, SLOT_BYTES, SLOTS, ring_slots_from
from engine.parallel.stage import WaitUntil, pieces_of

_WORD = 1 << 32  # numbers go round; streams compare them as signed distances
FAR = 1 << 30  # further than any message that is still in a stream


class Signals(Protocol):
    """Words of 32 bits in memory of the host, as streams see them. Both are put into the current stream.

    What the stream did before is seen by whoever sees a word that it wrote.
    """

    def wait(self, word: int, number: int) -> None:
        """Go on once the word at this offset in the memory has come to `number`."""
        ...

    def write(self, word: int, number: int) -> None:
        """Let the word at this offset be `number`."""
        ...


class DeviceRing:
    """One end of such a ring, see `Lane`: the memory is that of `Ring`."""

    def __init__(self, memory: torch.Tensor, start: int, signals: Signals, wait_until: WaitUntil) -> None:
        """`memory`: bytes that are pinned on this device, zeroed at first; the ring begins at `start`, a multiple of 4."""
        self._words = {word: memory[word : word + 4].view(torch.int32) for word in (start, start + LINE)}
        self._written, self._read = self._words
        begins = ring_slots_from(start)
        self._slots = [memory[begin : begin + SLOT_BYTES] for begin in begins]
        self._sizes = [begin - LINE + 8 * PIECE for begin in begins]  # read by what carries pieces to other hosts
        self._signals, self.wait_until = signals, wait_until
        self._number = 0  # pieces that were put into the stream, to be sent or received

    def send(self, tensor: torch.Tensor) -> None:
        """See `Lane.send`: the stream waits for room."""
        lanes = tensor.contiguous().view(-1).view(torch.uint8)
        for piece in pieces_of(lanes):
            if self._number >= SLOTS:
                self._signals.wait(self._read, (self._number + 1 - SLOTS) % _WORD)
            self._slots[self._number % SLOTS][: len(piece)].copy_(piece, non_blocking=True)
            self._signals.write(self._sizes[self._number % SLOTS], len(piece))
            self._number += 1
            self._signals.write(self._written, self._number % _WORD)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Lane.receive`: the stream waits for it."""
        lanes = tensor.view(-1).view(torch.uint8)
        for piece in pieces_of(lanes):
            self._signals.wait(self._written, (self._number + 1) % _WORD)
            piece.copy_(self._slots[self._number % SLOTS][: len(piece)], non_blocking=True)
            self._number += 1
            self._signals.write(self._read, self._number % _WORD)
        return tensor

    def give_up(self) -> None:
        """See `Lane.give_up`: the other end's word is far ahead from now on."""
        far = (self._number + FAR + (1 << 31)) % _WORD - (1 << 31)
        for word in self._words.values():
            word.fill_(far)
