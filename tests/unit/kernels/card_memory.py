"""Pinned memory beside the card of `card`, and what is being copied from it and to it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.kernels.card_rules import CardError


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy between pinned memory and the card that may not be over."""

    pinned: torch.Tensor
    numbers: torch.Tensor  # as they were when it began
    comes_back: bool

    def finish(self) -> None:
        if self.comes_back:
            self.pinned.copy_(self.numbers)
        elif not torch.equal(_bytes(self.pinned), _bytes(self.numbers)):
            raise CardError("pinned memory was written anew before its copy to the card was over")


class PinnedMemory:
    """Threads share it: a loader's copy, too."""

    def __init__(self) -> None:
        self._pinned: dict[int, StorageWeakRef] = {}
        self._copies: list[_Copy] = []
        self._over = 0  # of all copies there ever were
        self._lock = threading.Lock()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's memory is pinned from now on."""
        ref = StorageWeakRef(tensor.untyped_storage())
        self._pinned[ref.cdata] = ref
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        ref = self._pinned.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def begin(self, pinned: torch.Tensor, numbers: torch.Tensor, *, comes_back: bool) -> None:
        """A copy of `numbers` begins, to the card, or from there into `pinned`: nobody may read that yet."""
        with self._lock:
            self._copies.append(_Copy(pinned, numbers.clone(), comes_back))
            if comes_back:
                _bytes(pinned).fill_(0xFF)

    def begun(self) -> int:
        """How many copies there were."""
        with self._lock:
            return self._over + len(self._copies)

    def finish(self, count: int) -> None:
        """The first `count` copies are over."""
        with self._lock:
            more = max(0, count - self._over)
            done, self._copies = self._copies[:more], self._copies[more:]
            self._over += more
            for copy in done:
                copy.finish()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
