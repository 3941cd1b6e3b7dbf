"""GPUs that torch would find, without importing it: its build from a file of the package, the rest from CUDA's driver.

The child can be given up where a driver hangs, and this process has no CUDA of its own afterwards.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from services.runtime.checks.finding import Finding

ASK_S = 30.0
SCRIPT = Path(__file__).with_name("cuda.py")
INSTALL = "install a CUDA build of torch, and a driver"


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed build; `cuda` is "" for a CPU build."""

    version: str
    cuda: str


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int


def torch_build() -> Torch | None:
    """Read the build from `torch/version.py` without running it; None without torch, or if it says nothing."""
    package = find_spec("torch")
    folders = package.submodule_search_locations if package is not None else None
    file = Path(next(iter(folders or [""]))) / "version.py"
    return read_build(file.read_text(encoding="utf-8")) if folders and file.is_file() else None


def read_build(source: str) -> Torch | None:
    """Parse the text of `torch/version.py`."""
    found = {
        name: match[1] or ""
        for name in ("__version__", "cuda")
        if (match := re.search(rf"^{name}\b[^=\n]*= (?:'([^']*)'|None)$", source, re.MULTILINE))
    }
    return Torch(found["__version__"], found["cuda"]) if len(found) == 2 else None


def visible_gpus() -> list[Gpu] | None:
    """GPUs that a process started now would see; None if the driver does not answer in time."""
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-S", str(SCRIPT)], capture_output=True, text=True, timeout=ASK_S, check=False
        )
        return [Gpu(*each) for each in json.loads(asked.stdout)]
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return None


def check_gpus(asked: str, devices: Sequence[str], build: Torch | None, gpus: Sequence[Gpu] | None) -> Finding:
    """Check that each worker has its device, "cuda:N" or "cuda". `asked`: the value of --device. `gpus`: see `visible_gpus`."""
    asked = f"--device {asked}"
    if build is None:
        return Finding("torch", "ok", "its build is not known")
    if not build.cuda:
        return Finding("torch", "fail", f"{asked}: torch {build.version} sees no GPU", INSTALL)
    if gpus is None:
        return Finding("gpu", "fail", f"{asked}: the driver gives no answer", "see `nvidia-smi` and dmesg")
    if not gpus:
        return Finding(
            "gpu", "fail", f"{asked}: torch {build.version} sees no GPU", "install a driver; see `nvidia-smi`"
        )
    needed = 1 + max(int(device.partition(":")[2] or 0) for device in devices)
    if needed > len(gpus):
        text = f"{asked}: {needed} GPUs are needed, {len(gpus)} {'is' if len(gpus) == 1 else 'are'} there"
        return Finding(
            "gpu", "fail", text, "--prefill 0 --decode 1 needs one, as does --device cuda:0 with --kv-memory-mb"
        )
    return Finding("gpu", "ok", f"{len(gpus)} GPU(s): {', '.join(dict.fromkeys(gpu.name for gpu in gpus))}")
