"""Twins: a function in plain torch, and one of the same name and signature in Triton.

The plain one runs on the CPU and is the reference in tests. Triton is imported only where it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

from engine.kernels.device import use_triton

P = ParamSpec("P")
R = TypeVar("R")


class Twin(Generic[P, R]):
    """Calls the version that computes the first argument, a tensor; `reference` is the plain one."""

    def __init__(self, reference: Callable[P, R], module: str) -> None:
        self.reference = reference
        self._module = module
        self._kernel: Callable[P, R] | None = None
        functools.update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensor: Any = args[0]
        if not use_triton(tensor):
            return self.reference(*args, **kwargs)
        if self._kernel is None:
            self._kernel = getattr(import_module(self._module), self.reference.__name__)
        return self._kernel(*args, **kwargs)


def twin(module: str) -> Callable[[Callable[P, R]], Twin[P, R]]:
    """Decorate the plain version with the module of the Triton version."""

    def decorate(reference: Callable[P, R]) -> Twin[P, R]:
        return Twin(reference, module)

    return decorate
