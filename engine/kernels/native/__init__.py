"""Kernels in C for x86-64, compiled by this machine's compiler when a model first wants them, and kept in the user's cache.

An image or a package may bring them compiled, beside the source (`python -m engine.kernels.native`). Whoever has no compiler, or
another processor, computes with torch: `library` is None.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("baton.engine")

FOLDER = Path(__file__).parent
# Compilers that fuse products with sums would differ in bits.
FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-ffp-contract=off")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0
_NEEDED = {"avx2", "fma", "f16c"}  # flags in /proc/cpuinfo


class NotCompiledError(Exception):
    """There is no compiler, or it refuses the source."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they can't be had, which is logged once."""
    if not is_suitable():
        return None
    try:
        return ctypes.CDLL(str(compiled(cache())))
    except (NotCompiledError, OSError) as error:
        log.warning("engine.not_compiled", extra={"error": str(error), "remedy": "install gcc or clang"})
        return None


def is_suitable() -> bool:
    """True on an x86-64 with AVX2, unless `ATEN_CPU_CAPABILITY` forbids it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT" and _features() >= _NEEDED


@functools.cache
def _features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def cache() -> Path:
    """The folder of compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton" / "kernels"


def compiled(folder: Path) -> Path:
    """The compiled library in `folder`, made if it is missing. Raises NotCompiledError, OSError."""
    sources = sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])
    every = hashlib.sha256(repr(FLAGS).encode())
    for source in sources:
        every.update(source.read_bytes())
    library = folder / f"kernels-{every.hexdigest()[:32]}.so"
    for each in (library, FOLDER / library.name):
        if each.is_file():
            return each
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), *COMPILERS)))), None)
    if compiler is None:
        raise NotCompiledError(f"no C compiler ({', '.join(COMPILERS)})")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / library.name
        files = [str(source) for source in sources if source.suffix == ".c"]
        command = [compiler, *FLAGS, "-o", str(made), *files, "-lpthread"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        except subprocess.TimeoutExpired:
            raise NotCompiledError(f"{compiler} took more than {COMPILE_S:.0f} s") from None
        if done.returncode:
            raise NotCompiledError(f"{compiler}: {done.stderr.strip()[-300:]}")
        os.replace(made, library)  # another process may have made it, too
    return library
