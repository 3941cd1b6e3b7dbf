"""Kernels in C for x86-64 and Arm, compiled by this machine's compiler when a model first wants them, and kept in a cache.

An image or a package may bring them compiled, beside the source (`python -m engine.kernels.native`). Whoever has no compiler, or
another processor, computes with torch: `library` is None.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

log = logging.getLogger("baton.engine")

FOLDER = Path(__file__).parent
# Compilers that fuse products with sums would differ in bits. Sums of whole numbers may overflow where a row is no number.
# A function of a library that isn't linked is an error here, not where the kernels are loaded.
FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-ffp-contract=off", "-fwrapv", "-Wl,-z,defs")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0
# Instructions that `vectors.h` names, as /proc/cpuinfo has them.
NARROW, NEON = frozenset({"avx2", "fma", "f16c"}), frozenset({"asimd"})
NEEDED = {"x86_64": NARROW, "aarch64": NEON}  # by architecture
# An Arm's bits of AT_HWCAP.
AT_HWCAP = 16
HWCAPS = {"asimd": 1 << 1, "asimddp": 1 << 20}


class NotCompiledError(Exception):
    """There is no compiler, or it refuses the source."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they can't be had, which is logged once."""
    if not is_suitable():
        return None
    try:
        return loaded()
    except (NotCompiledError, OSError) as error:
        remedy = "install gcc or clang"
        if isinstance(error, OSError):
            remedy = "set XDG_CACHE_HOME to a folder of yours whose files may be executed"
        log.warning("engine.not_compiled", extra={"error": str(error), "remedy": remedy})
        return None


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Compile now what a model will want that computes in `dtype`, and not while its first request waits."""
    if device.type == "cpu" and dtype == torch.float32:
        library()


def loaded() -> ctypes.CDLL:
    """Load the kernels of the cache, or compile them beside it if it can't be used. Raises NotCompiledError, OSError.

    It may belong to somebody else, be read-only, or hold what was compiled on another machine.
    """
    try:
        return ctypes.CDLL(str(compiled(cache())))
    except OSError as error:
        log.info("engine.kernels_not_cached", extra={"error": str(error)})
    with tempfile.TemporaryDirectory() as own:
        return ctypes.CDLL(str(_compile(Path(own) / "kernels.so")))


def is_suitable() -> bool:
    """True on an x86-64 with AVX2 and on a 64-bit Arm, unless `ATEN_CPU_CAPABILITY` forbids it."""
    needed = NEEDED.get(platform.machine())
    if sys.platform != "linux" or needed is None or os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "default":
        return False
    # an Arm's torch names no capability but SVE
    return features() >= needed and (is_arm() or torch.backends.cpu.get_cpu_capability() != "DEFAULT")


def is_arm() -> bool:
    """True on a 64-bit Arm."""
    return platform.machine() == "aarch64"


@functools.cache
def features() -> frozenset[str]:
    """This processor's instructions by their names in /proc/cpuinfo; none if they can't be read."""
    if is_arm():
        bits = ctypes.CDLL(None).getauxval(ctypes.c_ulong(AT_HWCAP))
        return frozenset(name for name, bit in HWCAPS.items() if bits & bit)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def cache() -> Path:
    """The folder of compiled kernels. Raises OSError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton" / "kernels"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def compiled(folder: Path) -> Path:
    """The compiled library in `folder`, made if it is missing. Raises NotCompiledError, OSError."""
    every = hashlib.sha256(repr(FLAGS).encode())
    for source in _sources():
        every.update(source.read_bytes())
    library = folder / f"kernels-{every.hexdigest()[:32]}.so"
    if (beside := FOLDER / library.name).is_file():
        return beside
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        own = os.fstat(handle)
        is_own = own.st_uid in (0, os.geteuid()) and not own.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not is_own and folder != FOLDER:  # who may write there may write the source, too
            raise OSError(errno.EPERM, "others may write there", str(folder))
        fcntl.flock(handle, fcntl.LOCK_EX)  # processes that start together compile once
        if not library.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as made:
                os.replace(_compile(Path(made) / library.name), library)
    finally:
        os.close(handle)
    return library


def _sources() -> list[Path]:
    return sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])


def _compile(library: Path) -> Path:
    """Compile the kernels; return `library`. Raises NotCompiledError, OSError."""
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), *COMPILERS)))), None)
    if compiler is None:
        raise NotCompiledError(f"no C compiler ({', '.join(COMPILERS)})")
    command = [compiler, *FLAGS, "-o"]
    with (
        tempfile.TemporaryDirectory(dir=library.parent) as made,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
    ):
        objects = {Path(made) / f"{source.stem}.o": source for source in _sources() if source.suffix == ".c"}
        for done in [threads.submit(_run, [*command, each, "-c", source]) for each, source in objects.items()]:
            done.result()
        _run([*command, library, *objects, "-lpthread"])
    return library


def _run(command: Sequence[str | Path]) -> None:
    """Run a compiler. Raises NotCompiledError, OSError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotCompiledError(f"{command[0]} took more than {COMPILE_S:.0f} s") from None
    if done.returncode:
        raise NotCompiledError(f"{command[0]}: {done.stderr.strip()[-300:]}")
