"""Words for the device: pinned buffers in rotation, so that one is written while the copy of another may still be under way."""

from __future__ import annotations

import numpy as np
import torch

Words = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Staging:
    """Used by one thread. `write`, fill, `send`: one copy to the device, without waiting for it."""

    def __init__(self, device: torch.device, *, buffers: int = 3, capacity: int = 4096) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers = [self._allocate(capacity) for _ in range(buffers)]
        self._arrays: list[Words] = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() if self._pinned else None for _ in range(buffers)]
        self._turn = 0

    def write(self, count: int) -> Words:
        """Return room for `count` int64 words, to be filled and sent before the next call."""
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        if event := self._copied[turn]:
            event.synchronize()  # of the pass before the last two: over, but for a host far ahead
        if len(self._arrays[turn]) < count:
            self._buffers[turn] = self._allocate(max(count, 2 * len(self._arrays[turn])))
            self._arrays[turn] = self._buffers[turn].numpy()
        return self._arrays[turn][:count]

    def send(self, count: int) -> torch.Tensor:
        """Return the first `count` words that were written, on the device."""
        words = torch.empty(count, dtype=torch.int64, device=self._device)
        words.copy_(self._buffers[self._turn][:count], non_blocking=True)
        if event := self._copied[self._turn]:
            event.record()
        return words

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=self._pinned)
