"""Temporary tensors of loading: quantised ones that are converted, plain ones that are quantised."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch

# Bytes above which tensors get their own mapping: freed heap stays with the process, between live allocations.
_LARGE = 1 << 20
Store = Callable[[Mapping[str, torch.Tensor]], None]


class Stage:
    """Some tensors, from their first bytes until `store` has consumed all of them. Shared by a loader's threads.

    `store` uses torch alone: on a GPU it runs while our kernels are compiled, and then they aren't launched. There one stage is
    stored at a time (`storing`): what it takes for a while is much of what a GPU has left, and a GPU is not faster with two.
    """

    def __init__(self, store: Store, device: torch.device, storing: threading.Lock | None = None) -> None:
        self._store, self._device = store, device
        self._storing = storing if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}
        self._allocated: dict[str, torch.cuda.Event] = {}
        self._written: dict[int, torch.cuda.Event] = {}  # by writing stream
        self._missing = 0  # elements
        self.num_bytes = 0

    def slot(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """Add a tensor of this shape."""
        plan = torch.empty(shape, dtype=dtype, device="meta")
        self._missing += plan.numel()
        self.num_bytes += plan.nbytes
        return Slot(self, kind, plan)

    def tensor(self, kind: str, plan: torch.Tensor) -> torch.Tensor:
        """The tensor's memory, for the current stream."""
        with self._lock:
            if kind not in self._tensors:
                self._tensors[kind] = self._memory(plan)
                if self._device.type == "cuda":
                    self._allocated[kind] = torch.cuda.Event()
                    self._allocated[kind].record()
            elif self._device.type == "cuda":
                # Another stream's earlier work may still use this memory.
                torch.cuda.current_stream().wait_event(self._allocated[kind])
            return self._tensors[kind]

    def _memory(self, plan: torch.Tensor) -> torch.Tensor:
        size = plan.numel() * plan.dtype.itemsize
        if self._device.type != "cpu" or size < _LARGE:
            return torch.empty(plan.shape, dtype=plan.dtype, device=self._device)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapping, dtype=torch.uint8).view(plan.dtype).view(plan.shape)

    def arrived(self, count: int) -> None:
        """Record that so many elements were written in the current stream."""
        with self._lock:
            self._missing -= count
            if self._device.type == "cuda":
                stream = torch.cuda.current_stream()
                event = self._written.setdefault(stream.cuda_stream, torch.cuda.Event())
                event.record(stream)
            if self._missing:
                return
            tensors, self._tensors = self._tensors, {}
        for event in self._written.values():
            torch.cuda.current_stream().wait_event(event)
        with self._storing or nullcontext():
            self._store(tensors)
            if self._device.type == "cuda":
                # The memory is free for every stream afterwards.
                torch.cuda.current_stream().synchronize()


class Slot:
    """One tensor of a stage. `plan` has its shape and no memory: `real` maps views of it to memory."""

    def __init__(self, stage: Stage, kind: str, plan: torch.Tensor) -> None:
        self._stage, self._kind, self.plan = stage, kind, plan

    def real(self, view: torch.Tensor) -> torch.Tensor:
        """The memory behind a view of the plan."""
        whole = self._stage.tensor(self._kind, self.plan)
        return whole.as_strided(view.shape, view.stride(), view.storage_offset())

    def arrived(self, count: int) -> None:
        self._stage.arrived(count)
