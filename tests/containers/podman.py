"""Podman as these tests call it: runc for a runtime, limits that a machine inside another one allows."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD_S, CALL_S = 3600.0, 120.0
MOST_FILES, MOST_PROCESSES = 4096, 4096


def settings(folder: Path) -> Path:
    """Write a containers.conf; crun and podman's default limits fail in virtual machines without all rights."""
    files = min(MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    file = folder / "containers.conf"
    file.write_text(
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={MOST_PROCESSES}:{MOST_PROCESSES}"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n',
        encoding="utf-8",
    )
    return file


_SETTINGS = settings(Path(tempfile.mkdtemp(prefix="baton-containers-")))


class PodmanError(Exception):
    """A call of podman failed; its last lines are the text."""


def podman(*words: str, limit_s: float = CALL_S) -> str:
    """Return what a call prints. Raises PodmanError, TimeoutExpired."""
    done = _call(words, limit_s)
    if done.returncode:
        raise PodmanError(f"podman {' '.join(words[:3])} …: " + "\n".join(done.stderr.strip().splitlines()[-8:]))
    return done.stdout.strip()


def succeeds(*words: str, limit_s: float = CALL_S) -> bool:
    """Whether a call ends with 0."""
    return _call(words, limit_s).returncode == 0


def inspected(name: str) -> dict[str, Any]:
    """A container's state."""
    state: dict[str, Any] = json.loads(podman("inspect", "--format", "{{json .State}}", name))
    return state


def _call(words: tuple[str, ...], limit_s: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CONTAINERS_CONF": str(_SETTINGS)}
    return subprocess.run(
        ["podman", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
