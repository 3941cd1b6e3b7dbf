"""Launching the same kernel again and again without Triton's look at every argument, and compiling many of them at once.

Triton's look takes longer than a small kernel. Its compilation takes 0.1 to 3 s a variant, and a C compiler then builds what
launches it; most of both goes on without Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

MOST_THREADS = 16  # of compilation

_asked: set[tuple[int, object]] | None = None  # kernels and variants to be compiled; None: not within `compiled_ahead`


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Within, kernels are compiled, several at a time, and not launched: whatever they would have written stays as it was.

    Returns when all are compiled and loaded. Of those that can't be, the launch that needs one says why. One thread at a time.
    """
    import triton

    global _asked
    threads = min(os.cpu_count() or 1, MOST_THREADS)
    with _Compilers(threads, "compile") as compilers, triton.AsyncCompileMode(compilers, ignore_errors=True):
        _asked = set()
        try:
            yield
        except BaseException:
            compilers.is_needed = False
            raise
        finally:
            _asked = None


def is_compiling_ahead() -> bool:
    """Whether launches compute nothing now."""
    return _asked is not None


class _Compilers(ThreadPoolExecutor):
    is_needed = True  # else nothing more is begun; Triton waits for every future, and for ever for a cancelled one

    def submit(self, compile: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            if not self.is_needed:
                raise RuntimeError("the engine did not get so far")
            kernel = compile(*arguments, **named)
            assert kernel.run  # asking for it loads the kernel, and compiles the function that launches it
            return kernel

        return super().submit(compile_and_load)


class Kernel:
    """A function of `triton.jit` with its options.

    `launch` is told what decides on the compiled variant: everything about the arguments that Triton would look at (types,
    alignment, divisibility, compile-time values). Whatever is not in that key must be the same in all launches, and arguments
    are positional, compile-time ones included. With None for a variant Triton looks for itself, and arguments may have names.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self.function = function
        self._options = options
        self._variants: dict[object, Any] = {}

    def launch(self, grid: tuple[int, ...], variant: object, *arguments: Any, **options: Any) -> None:
        """`options` (warps, stages) count when a variant is compiled; they belong to the key if they vary."""
        if _asked is not None:
            if variant is None or (id(self), variant) not in _asked:
                _asked.add((id(self), variant))
                self.function.warmup(*arguments, grid=grid, **self._options, **options)
            return
        compiled = self._variants.get(variant)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*arguments)
            return
        compiled = self.function[grid](*arguments, **self._options, **options)
        if variant is not None and compiled is not None:  # Triton's interpreter compiles nothing
            self._variants[variant] = compiled
