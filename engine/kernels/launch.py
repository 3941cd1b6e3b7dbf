"""Launching kernels without Triton's inspection of every argument, and compiling many kernels at once.

That look takes longer than a small kernel. Compilation takes 0.1 to 3 s a variant, then a C compiler builds the launcher; most
of both runs without Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

MAX_COMPILING_THREADS = 16

_asked: set[tuple[int, object]] | None = None  # kernels and variants to compile; None: outside `compiled_ahead`


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Context manager: kernels are compiled concurrently instead of launched; nothing is written.

    Returns when all are compiled and loaded. A kernel that can't be compiled fails at its first launch. One thread at a time may
    use this.
    """
    import triton

    global _asked
    threads = min(os.cpu_count() or 1, MAX_COMPILING_THREADS)
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
    """True if launches only compile now."""
    return _asked is not None


class _Compilers(ThreadPoolExecutor):
    # False: don't start more. A cancelled future would make Triton wait for ever.
    is_needed = True

    def submit(self, compile: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            if not self.is_needed:
                raise RuntimeError("the engine did not get so far")
            kernel = compile(*arguments, **named)
            assert kernel.run  # loads the kernel, and compiles its launcher
            return kernel

        return super().submit(compile_and_load)


class Kernel:
    """A function of `triton.jit` with its options.

    `launch`'s `variant` must hold all that selects the compiled variant: the arguments' types, alignment, divisibility and
    compile-time values. Anything else must be the same in all launches, and arguments are positional, compile-time ones
    included. With None Triton looks for itself, and arguments may have names.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self.function = function
        self._options = options
        self._variants: dict[object, Any] = {}

    def launch(self, grid: tuple[int, ...], variant: object, *arguments: Any, **options: Any) -> None:
        """`options` (warps, stages) apply when a variant is compiled; include them in the key if they vary."""
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
