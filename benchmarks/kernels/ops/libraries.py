"""Libraries that implement ops, imported once and only where they are installed."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from benchmarks.kernels.ops.comparing import MissingLibrary

# A library's import name -> its package.
PACKAGES = {
    "flashinfer": "flashinfer-python",
    "fla": "fla-core",
    "deep_gemm": "DeepGEMM",
    "flash_mla": "FlashMLA",
    "flash_attn_interface": "FlashAttention-3",
}


@functools.cache
def _found(name: str) -> Any:
    """The module, or the reason why there is none."""
    try:
        return import_module(name)
    except Exception as failure:  # a wheel for another CUDA fails in its own ways
        absent = isinstance(failure, ModuleNotFoundError) and failure.name == name.partition(".")[0]
        return "not installed" if absent else f"not usable: {type(failure).__name__}: {str(failure)[:120]}"


def library(name: str) -> Any:
    """Return the module of that import name. Raises MissingLibrary with what is said of it."""
    found = _found(name)
    if isinstance(found, str):
        raise MissingLibrary(f"{name.partition('.')[0]}: {found}")
    return found


def described() -> dict[str, str]:
    """Each library's version, or why it is left out."""
    return {
        package: found if isinstance(found := _found(name), str) else str(getattr(found, "__version__", "installed"))
        for name, package in PACKAGES.items()
    }
