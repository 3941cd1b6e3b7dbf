"""Values shared by a pass's layers, computed by the first that needs them. For plain torch; kernels recompute them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@functools.cache
def constant(value: float, device: torch.device) -> torch.Tensor:
    """Return the number as a tensor [] float32: an operation takes twice as long with a Python number."""
    return torch.tensor(value, device=device)


class Once:
    """The shared values of one pass. Keys that are `id`s must be of objects that outlive it."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._found:
            self._found[key] = compute()
        found: T = self._found[key]
        return found
