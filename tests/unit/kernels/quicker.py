"""Triton's interpreter with less Python: it spends most of its time on types and patches.

Values stay as they are. What types alone decide is computed once. Overflow is not looked for: without `debug` nobody is told.
Written for Triton 3.6: where another one differs, checks fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quicker() -> None:
    """Change the interpreter of this process. It interprets from here on: what is patched stays patched."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _numpy_dtypes(interpreter._get_np_dtype)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    TritonSemantic.computation_type_impl = _remembered_by_types(TritonSemantic.computation_type_impl)
    TritonSemantic.broadcast_impl_value = _unlike_alone(TritonSemantic.broadcast_impl_value)
    tl.core.block_type.__init__ = _block_types(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _init_tensor


def _numpy_dtypes(compute: Any) -> Any:
    known: dict[str, np.dtype[Any]] = {}

    def numpy_dtype(of: Any) -> np.dtype[Any]:
        name = of.scalar.name
        if name not in known:
            known[name] = compute(of)
        return known[name]

    return numpy_dtype


class _Stays:
    """In place of a scope of patches."""

    def restore(self) -> None:
        pass


def _patched_once(patch: Any) -> Any:
    """For each module of kernels, by what it calls Triton's."""
    done = set[str]()

    def patched(function: Any) -> _Stays:
        if function.__module__ not in done:
            patch(function)
            done.add(function.__module__)
        return _Stays()

    return patched


def _remembered_by_types(compute: Any) -> Any:
    known: dict[tuple[str, bool, str, bool, bool], Any] = {}

    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, divides)
        if key not in known:
            known[key] = compute(self, a, a_is_scalar, b, b_is_scalar, divides)
        return known[key]

    return computation_type


def _block_types(init: Any) -> Any:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        dims = tuple([dim.value if isinstance(dim, tl.constexpr) else dim for dim in shape])
        key = (element_ty.name, dims)
        if key not in known:
            init(self, element_ty, shape)
            self.dims, self.of_tensors = dims, _shape_of_tensors(dims)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return init_block_type


def _unlike_alone(broadcast: Any) -> Any:
    """Only sides of two shapes are made alike."""

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        dims, others = (side.type.dims if side.type.is_block() else () for side in (left, right))
        return (left, right) if dims == others else broadcast(self, left, right)

    return broadcast_unlike


def _shape_of_tensors(dims: Sequence[int]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(dims)), tl.tuple([tl.constexpr(dim) for dim in dims])


OF_SCALARS = _shape_of_tensors(())


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if type.is_block() else OF_SCALARS
