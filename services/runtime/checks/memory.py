"""Estimates of the memory that a model's weights need, made before loading, and of the memory available."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from modelfiles.gguf import KINDS
from services.runtime.checks.finding import Finding
from services.runtime.checks.gpus import Gpu
from services.runtime.checks.model import gigabytes
from services.runtime.checks.weights import FLOATS, Weights, weights_of

BYTES_OF = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
BLOCKS = {name for name, elements, _ in KINDS.values() if elements > 1} - {
    "MXFP4"
}  # GGUF weights that a CPU dequantises
BFLOAT16_FLAGS = {"avx512_bf16", "amx_tile"}
# Share of a GPU's memory for weights: CUDA, graphs, activations and a small pool take the rest.
GPU_SHARE = 0.92
V1_LIMIT, V2_LIMIT = "sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory.max"


def check_fit(
    model: Path, *, gpus: Sequence[Gpu] | None = None, dtype: str = "auto", quantization: str = "auto", ranks: int = 1
) -> Finding:
    """Check that the weights fit into this machine's memory, or its smallest GPU's for each rank. `gpus`: None on a CPU."""
    weights = weights_of(model)
    if gpus is None:
        available, what = available_bytes(), "memory that is free"
    else:
        total = min((gpu.total_bytes for gpu in gpus), default=None)
        available = None if total is None else int(GPU_SHARE * total) * ranks
        what = f"{'a GPU' if ranks == 1 else f'{ranks} GPUs'}'s memory that a pass and a small pool leave"
    needed = bytes_in_memory(
        weights, on_cpu=gpus is None, dtype=dtype, quantization=quantization, has_bfloat16=has_bfloat16()
    )
    return check_memory(needed, available, what)


def bytes_in_memory(weights: Weights, *, on_cpu: bool, dtype: str, quantization: str, has_bfloat16: bool) -> int:
    """Size of the loaded weights, by the engine's rules in short: floats become `dtype`, quantised weights stay packed on a GPU.

    On a CPU a GGUF file's codes become floats, or rows of 8 bits where the processor has bfloat16.
    """
    asked = BYTES_OF.get(quantization) or BYTES_OF.get(dtype)
    floats = asked or (4.0 if on_cpu and not (has_bfloat16 and weights.mostly == "BF16") else 0.0)
    total = 0.0
    for kind, count in weights.elements.items():
        if kind in FLOATS:
            total += count * (floats or FLOATS[kind])
        elif on_cpu and kind in BLOCKS:
            total += count * (asked or (BYTES_OF["int8"] if has_bfloat16 else BYTES_OF["float32"]))
        else:
            total += weights.bytes_of_codes(kind)
    return int(total)


def check_memory(needed: int, available: int | None, what: str) -> Finding:
    """Check that so many bytes of weights fit. `what`: the memory's name; `available`: None if unknown."""
    text = f"the weights take about {gigabytes(needed)} in memory"
    if available is None:
        return Finding("memory", "ok", text)
    if needed > available:
        remedy = "take a smaller model, or --quantization int8 on a CPU, fp8 or int4 on a GPU"
        return Finding("memory", "warn", f"{text}, more than the {gigabytes(available)} of {what}", remedy)
    return Finding("memory", "ok", f"{text}, of {gigabytes(available)} of {what}: they fit")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that processes may use now: the system's figure, bounded by a container's limit. None if neither is known."""
    meminfo = re.search(r"^MemAvailable: *(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    found = [int(meminfo[1]) * 1024] if meminfo else []
    found += [int(text) for name in (V1_LIMIT, V2_LIMIT) if (text := _read(root / name).strip()).isdigit()]
    return min(found, default=None)


def has_bfloat16(root: Path = Path("/")) -> bool:
    """True if the processor has bfloat16 instructions."""
    flags = re.search(r"^flags\s*: (.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return bool(flags and BFLOAT16_FLAGS & {*flags[1].split()})


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
