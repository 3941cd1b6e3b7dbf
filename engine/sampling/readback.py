"""Copies from the device to the host that nobody waits for until they are needed."""

from __future__ import annotations

import torch


class Readback:
    """A tensor on its way to the host, behind the work that computes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here = tensor
        self._over: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._over = torch.cuda.Event()
            self._over.record()

    @property
    def is_immediate(self) -> bool:
        """True if the tensor was on the host already."""
        return self._over is None

    def wait(self) -> torch.Tensor:
        """Block until the tensor is here. Any thread may repeat it."""
        if self._over is not None:
            self._over.synchronize()
        return self._here
