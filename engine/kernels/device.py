"""Facts about a kernel's device, and the choice between a kernel's two versions, its twins.

A twin is a function in plain torch, which runs on the CPU and is the reference in tests, or one of the same name and signature
in Triton, which is imported only where it runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from engine.kernels import native

P = ParamSpec("P")
R = TypeVar("R")

_meta_is_a_gpu = ContextVar("meta_is_a_gpu", default=False)
_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter, for tests on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device's description, with the number of processors for grids and tile tables."""

    processors: int  # streaming multiprocessors: H100 and H200 132, B200 148, A100 108
    has_tma: bool  # bulk copies (TMA), and programmatic dependent launch
    is_hopper: bool  # supports instructions of this generation only


# Without a GPU, work is divided as on Hopper, so that the interpreter checks its shapes.
_NO_GPU = Device(processors=132, has_tma=False, is_hopper=False)


@functools.cache
def describe(device: torch.device) -> Device:
    if device.type != "cuda":
        return _NO_GPU
    major, _ = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Device(processors=processors, has_tma=major >= 9, is_hopper=major == 9)


def use_triton(x: torch.Tensor) -> bool:
    """True if the Triton version computes this tensor, else plain torch."""
    return x.is_cuda or _INTERPRET or (x.is_meta and _meta_is_a_gpu.get())


@contextlib.contextmanager
def meta_as_a_gpu() -> Iterator[None]:
    """Context manager: tensors without memory (torch's meta device) are laid out as a GPU's, for counting."""
    before = _meta_is_a_gpu.set(True)
    try:
        yield
    finally:
        _meta_is_a_gpu.reset(before)


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


def native_takes(heads: torch.Tensor, pool: torch.Tensor, *numbers: torch.Tensor) -> bool:
    """True if C's kernels take heads [T, H, D], a layer of a pool [num_blocks, 2, B, Hkv, D], and tables of whole numbers."""
    return (
        heads.dtype == torch.float32
        and pool.dtype in (torch.float32, torch.float16)
        and heads.stride()[1:] == (heads.shape[2], 1)
        and pool.stride(4) == 1
        and all(each.dtype == torch.int32 and each.stride(-1) == 1 for each in numbers)
        and native.library() is not None
    )
