"""What Triton compiles in a process of its own, with a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Compilation = tuple[str, str, bool]  # kernel, thread, whether it was in the cache


def watch() -> list[Compilation]:
    """Return a list that grows with each compilation in this process from now on."""
    from triton import knobs

    compiled: list[Compilation] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        compiled.append((src.name, threading.current_thread().name.split("_")[0], cache_hit))

    knobs.compilation.listener = listen
    return compiled


def told_by(module: str, *arguments: str, cache: Path, timeout_s: float, options: Sequence[str] = ()) -> Any:
    """Run `python -m module` with this cache and return the JSON of the last line that it prints; `options` are Python's."""
    child = subprocess.run(
        [sys.executable, *options, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])
