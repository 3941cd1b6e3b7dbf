"""Triton's interpreter with less Python: it spends most of its time on types and patches.

Values stay as they are. What types alone decide is computed once, and so is what numbers in a kernel's text are as tensors.
Sides of an operator are broadcast by numpy. Overflow is not looked for: without `debug` nobody is told. Written for Triton 3.6:
where another one differs, checks fail.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    interpreter._patch_attr = _patch_attr
    interpreter.TensorHandle.__init__ = _handles(interpreter._validate_np_data_size)
    tl.core._unwrap_if_constexpr = _at_once(tl.core._unwrap_if_constexpr)
    TritonSemantic.computation_type_impl = _remembered_by_types(TritonSemantic.computation_type_impl)
    TritonSemantic.binary_op_type_checking_impl = _sides(TritonSemantic.binary_op_type_checking_impl)
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


_BUILTIN = tl.core.builtin(len).__code__  # of the function that looks for `_semantic`, and calls


def _patch_attr(of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)
    called = member.__wrapped__ if member.__code__ is _BUILTIN else member

    def interpreted(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return called(*args, **options)

    scope.set_attr(of, name, interpreted)


def _handles(fits: Any) -> Any:
    """Values of a type. That they fit is looked for once for each two types."""
    known = set[tuple[Any, str]]()

    def init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if (key := (data.dtype, dtype.name)) not in known:
            if not fits(data, dtype):
                raise ValueError(f"{data.dtype} does not fit into {dtype}")
            known.add(key)

    return init_handle


def _at_once(unwrap: Any) -> Any:
    """`_unwrap_if_constexpr`, by the argument's class, which tells nearly always."""
    are_it = {tl.core.tensor, tl.core.dtype, int, float, bool, str, type(None)}

    def unwrap_if_constexpr(of: Any) -> Any:
        kind = type(of)
        if kind is tl.core.constexpr:
            return of.value
        return of if kind in are_it else unwrap(of)

    return unwrap_if_constexpr


@dataclass(frozen=True, slots=True)
class _Side:
    """The tensor of this type that an operator makes of a side; a number always becomes the same one."""

    type: Any
    number: Any  # None: it is a tensor already
    is_cast: bool
    is_it: bool

    def made_of(self, side: Any, semantic: Any) -> Any:
        if self.is_it:
            return side
        if self.number is not None:
            handle = interpreter.TensorHandle(self.number, self.type.scalar)
        else:
            handle = (semantic.cast(side, self.type.scalar) if self.is_cast else side).handle
        return tl.core.tensor(handle, self.type)


def _sides(check: Any) -> Any:
    """`binary_op_type_checking_impl`, once for each two types and numbers. Shapes are of types alone: numpy broadcasts data."""
    known: dict[tuple[Any, ...], tuple[_Side, _Side]] = {}

    def checked(self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        key = (_kind(lhs), _kind(rhs), options, *named.items())
        if key not in known:
            left, right = check(self, lhs, rhs, *options, **named)
            known[key] = _side(lhs, left), _side(rhs, right)
        first, second = known[key]
        return first.made_of(lhs, self), second.made_of(rhs, self)

    return checked


def _kind(of: Any) -> Any:
    if type(of) is tl.core.tensor:
        return of.type.name
    return type(of), str(of)  # -0.0 is not 0.0, and NaN is itself


def _side(given: Any, made: Any) -> _Side:
    if isinstance(given, numbers.Number):
        return _Side(made.type, made.handle.data.ravel()[:1].copy(), is_cast=False, is_it=False)
    is_cast = given.dtype != made.dtype
    return _Side(made.type, None, is_cast, is_it=given.type.name == made.type.name)


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
