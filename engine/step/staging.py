"""Inputs on their way to the device, and sampled tokens that may only be there yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.arrays import Integers
from engine.sequence import Sequence

STAGING_BUFFERS = 3  # two passes may be in flight while a third is prepared


class NewestTokens:
    """The tokens sampled by one pass: `tensor` [R] int64 on the device, one row for each sequence."""

    def __init__(self, tensor: torch.Tensor, sequences: Iterable[Sequence] = ()) -> None:
        self.tensor = tensor
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}

    @classmethod
    def none(cls, device: torch.device | str, sequences: Iterable[Sequence] = ()) -> NewestTokens:
        """The value before the first pass, or after one that sampled nothing."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device), sequences)

    def of(self, tensor: torch.Tensor) -> NewestTokens:
        """The same sequences' tokens of another pass."""
        newest = NewestTokens(tensor)
        newest._rows = self._rows
        return newest

    def row_of(self, sequence: Sequence) -> int | None:
        return self._rows.get(sequence)


class Staging:
    """The staging buffers, used by one thread. `write`, fill, `send`: one asynchronous copy to the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, capacity: int = 4096) -> None:
        self._device = device
        self._dtype = dtype
        self._pinned = device.type == "cuda"
        self._buffers = [self._allocate(capacity) for _ in range(STAGING_BUFFERS)]
        self._arrays: list[Integers] = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() if self._pinned else None for _ in range(STAGING_BUFFERS)]
        self._turn = 0

    def write(self, count: int) -> Integers:
        """Return a buffer for `count` words, to be filled and sent before the next call."""
        self._turn = turn = (self._turn + 1) % STAGING_BUFFERS
        if event := self._copied[turn]:
            event.synchronize()  # waits only if the host is three passes ahead
        if len(self._arrays[turn]) < count:
            self._buffers[turn] = self._allocate(max(count, 2 * len(self._arrays[turn])))
            self._arrays[turn] = self._buffers[turn].numpy()
        return self._arrays[turn][:count]

    def send(self, count: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the first `count` written words on the device: in new memory, or at the start of `into`."""
        words = torch.empty(count, dtype=self._dtype, device=self._device) if into is None else into[:count]
        words.copy_(self._buffers[self._turn][:count], non_blocking=True)
        if event := self._copied[self._turn]:
            event.record()
        return words

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, pin_memory=self._pinned)
