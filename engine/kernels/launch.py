"""Launching the same kernel again and again without Triton's look at every argument, which takes longer than a small kernel."""

from __future__ import annotations

from typing import Any


class Kernel:
    """A function of `triton.jit` with its options; arguments are positional, compile-time ones included.

    `launch` is told what decides on the compiled variant: everything about the arguments that Triton would look at (types,
    alignment, divisibility, compile-time values). Whatever is not in that key must be the same in all launches.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self.function = function
        self._options = options
        self._variants: dict[object, Any] = {}

    def launch(self, grid: tuple[int, ...], variant: object, *arguments: Any, **options: Any) -> None:
        """`options` (warps, stages) count when a variant is compiled; they belong to the key if they vary."""
        compiled = self._variants.get(variant)
        if compiled is None:
            compiled = self.function[grid](*arguments, **self._options, **options)
            if compiled is not None:  # Triton's interpreter compiles nothing
                self._variants[variant] = compiled
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments)
