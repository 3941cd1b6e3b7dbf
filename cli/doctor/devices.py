"""Checks of torch and the GPUs, in a process of its own that imports torch. Prints findings as JSON."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

from services.runtime.checks.finding import Finding

SMI_TIMEOUT_S = 20


def check() -> Iterator[Finding]:
    """Check torch, Triton, each GPU, and the links between them."""
    yield from _driver()
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "fail", "torch is missing", "run `make setup`")
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            "torch", "fail", f"torch {torch.__version__} sees no GPU", "install a CUDA build of torch, and a driver"
        )
        return
    yield Finding("torch", "ok", f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    if importlib.util.find_spec("triton") is None:
        yield Finding("triton", "fail", "triton is missing", "install the triton that belongs to this torch")
    else:
        import triton

        yield Finding("triton", "ok", f"triton {triton.__version__}")
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        text = f"cuda:{index} {torch.cuda.get_device_name(index)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        if free < total / 2:
            yield Finding("gpu", "warn", text, "another process holds memory: see nvidia-smi")
        else:
            yield Finding("gpu", "ok", text)
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        yield Finding(
            "peers",
            "warn",
            f"no peer access between GPUs {', '.join(apart)}",
            "use --transport ucx between them, and --pipeline-parallel-size to share a model",
        )
    elif count > 1:
        yield Finding("peers", "ok", f"all {count} GPUs reach each other's memory")


def _driver() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        yield Finding("driver", "warn", "no nvidia-smi", "install NVIDIA's driver, or give the container the GPUs")
        return
    version = _smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    if not version:
        yield Finding("driver", "fail", "nvidia-smi fails", "see `nvidia-smi` and dmesg")
        return
    yield Finding("driver", "ok", f"driver {version[0]}, {len(version)} GPU(s)")
    if len(version) > 1:
        yield links(_smi("topo", "-m"), len(version))


def links(table: str, count: int) -> Finding:
    """Parse `nvidia-smi topo -m`: pairs of GPUs without NVLink."""
    rows = [row.split() for row in table.splitlines() if row.startswith("GPU")]
    slow = [
        f"{one}-{other} ({row[1 + other]})"
        for one, row in enumerate(rows[:count])
        for other in range(one + 1, min(count, len(row) - 1))
        if not row[1 + other].startswith("NV")
    ]
    if slow:
        text = f"no NVLink between GPUs {', '.join(slow)}"
        return Finding(
            "links",
            "warn",
            text,
            "place ranks of a stage, and prefill and decode, on linked GPUs: sums and KV go over PCIe else",
        )
    return Finding("links", "ok", f"NVLink between all {count} GPUs")


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    json.dump([asdict(finding) for finding in check()], sys.stdout)
