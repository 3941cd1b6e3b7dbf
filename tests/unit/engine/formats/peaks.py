"""What storing a module takes for a while: bytes of all tensors that its `store` makes and frees."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.weights import parameters
from engine.weights.parameters import Weights
from engine.weights.stage import Stage, Store


class Made(TorchDispatchMode):
    """Counts the bytes of tensors that are made within, and are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._given.update(each._cdata for each in _memory((args, kwargs)) if each._cdata not in self._live)
        result = func(*args, **(kwargs or {}))
        for memory in _memory(result):
            key = memory._cdata
            if key not in self._live and key not in self._given:
                self._live[key] = memory.nbytes()
                weakref.finalize(memory, self._freed, key)
                self.now += memory.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._live.pop(key)


def _memory(tree: Any) -> Iterator[torch.UntypedStorage]:
    for each in tree_leaves(tree):
        if isinstance(each, torch.Tensor) and each.layout == torch.strided:  # oneDNN's own show none
            yield each.untyped_storage()


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, the peak of each stage in the order of `Weights._passing`."""
    peaks: list[int] = []

    def staged(store: Store, *given: Any) -> Stage:
        number = len(peaks)
        peaks.append(0)

        def watched(tensors: Mapping[str, torch.Tensor]) -> None:
            with Made() as made:
                store(tensors)
            peaks[number] = made.peak

        return Stage(watched, *given)

    monkeypatch.setattr(parameters, "Stage", staged)
    return peaks


def fill(weights: Weights) -> None:
    """Load something: codes and scales by chance, an order of inputs that is one."""
    for name, destinations in weights.destinations.items():
        for place in destinations:
            tensor = place.tensor if place.slot is None else place.slot.real(place.tensor)
            if name.endswith("g_idx"):
                tensor.copy_(torch.arange(tensor.numel()).flip(0) // (tensor.numel() // 16))
            elif tensor.dtype.is_floating_point and tensor.element_size() > 1:
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
            else:
                tensor.view(torch.uint8).copy_(torch.randint(0, 120, tensor.view(torch.uint8).shape))
            if place.slot is not None:
                place.slot.arrived(tensor.numel())
