"""The environment of a figure besides the code: date, machine, versions, command."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from engine.processor import settle

ROOT = Path(__file__).resolve().parents[1]
NEEDS_A_CARD = "needs a CUDA device"
_SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def describe(module: str, arguments: Sequence[str], device: torch.device, *, commit: str = "") -> dict[str, str]:
    """The facts that head a results page."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"`python -m {module} {shlex.join(arguments)}`".replace(" `", "`"),
        "commit": commit or _commit(),
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "transformers"))
        + f", python {platform.python_version()}",
    }
    if device.type == "cuda":
        facts["device"] = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
        facts["before"] = clocks(device)
    else:
        facts["device"] = f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
    return facts


def device_of(module: str, name: str) -> torch.device:
    """The device of that name. Without a card there, a program ends here and says so."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"{module}: {NEEDS_A_CARD}")
    if device.type == "cpu":
        settle()
    return device


def card_of(device: torch.device) -> str:
    """The card's kind in small letters, as it stands in names of files ("h200", "h100"); "" on a CPU."""
    if device.type != "cuda":
        return ""
    maker, _, rest = torch.cuda.get_device_name(device).partition(" ")
    return (rest or maker).lower().split()[0]


def clocks(device: torch.device) -> str:
    """Driver, clocks, power and temperature as nvidia-smi reads them now."""
    command = [
        "nvidia-smi",
        f"--id={device.index or 0}",
        "--query-gpu=" + ",".join(_SMI_FIELDS),
        "--format=csv,noheader",
    ]
    values = _output(command).split(", ")
    if len(values) != len(_SMI_FIELDS):
        return "nvidia-smi says nothing"
    return ", ".join(f"{name} {value}" for name, value in zip(_SMI_FIELDS, values, strict=True))


def _commit() -> str:
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return "unknown"
    return commit + (" with changes" if _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]) else "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
