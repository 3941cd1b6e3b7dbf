"""Usable instruction sets for oneDNN: a virtual machine may announce some that trap.

AMX is such a case: where the machine's monitor hides how large its tiles are (CPUID leaf 1D, zero under some Firecracker
templates), oneDNN's first product in bfloat16 ends the process with SIGILL.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import Callable

import torch

BOUND = "ONEDNN_MAX_CPU_ISA"  # oneDNN's own variable, read when it first computes
WITHOUT_TILES = "AVX512_CORE_BF16"
BEFORE_VNNI = ("SSE41", "AVX", "AVX2", "AVX512_CORE")
SIZE = 64  # rows and columns; oneDNN uses no tiles for smaller products


def _product() -> object:
    ones = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)
    return torch.nn.functional.linear(ones, ones)


def settle(
    *, has_tiles: Callable[[], bool] = torch.cpu._is_amx_tile_supported, trial: Callable[[], object] = _product
) -> str:
    """Run AMX tiles in a child; if it dies of SIGILL, restrict oneDNN to other instructions, here and in later children.

    Call it before the process computes or starts threads. Returns what oneDNN is kept to, "" for no bound; a user's own stays.
    """
    if BOUND not in os.environ and has_tiles() and _dies(trial):
        os.environ[BOUND] = WITHOUT_TILES
    return os.environ.get(BOUND, "")


def _dies(trial: Callable[[], object]) -> bool:
    """True if the trial kills a child with SIGILL."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            trial()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL


def has_avx512() -> bool:
    """True if torch and oneDNN may use AVX-512, also by their limits ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA.

    oneDNN reads its own when it is asked here: `settle` comes before.
    """
    capability = torch.backends.cpu.get_cpu_capability()  # an Arm's may be SVE
    return capability.startswith(("AVX512", "AVX10")) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def may_multiply_bytes() -> bool:
    """True unless ONEDNN_MAX_CPU_ISA keeps products to instructions older than VNNI."""
    return os.environ.get(BOUND, "").upper() not in BEFORE_VNNI


def multiplies_bfloat16_without_tiles() -> bool:
    """True if this processor has instructions for bfloat16, but none for tiles of it (AMX), or may not use these."""
    has_tiles = torch.cpu._is_amx_tile_supported() and os.environ.get(BOUND) != WITHOUT_TILES
    return has_avx512() and bool(torch.cpu._is_avx512_bf16_supported()) and not has_tiles
