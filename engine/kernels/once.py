"""What the layers of one pass have in common, computed by the first that needs it. For plain torch; kernels compute it again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """Of one pass. Keys that are `id`s must be of what outlives it."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._found:
            self._found[key] = compute()
        found: T = self._found[key]
        return found
