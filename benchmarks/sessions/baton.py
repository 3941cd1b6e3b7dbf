"""A whole Baton with one worker, as `baton up` starts it, for the time of a benchmark."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.environment import ROOT
from benchmarks.up import serving
from engine.cache.pages import page_parts
from engine.fake.engine import HEAD_DIM
from engine.families import read_model_spec

START_S = 240.0
TOLD = ("baton_worker_host_tier", "baton_worker_disk_tier", "baton_worker_cache_hit")


@contextmanager
def running(model: Path, *, device: str, port: int, out: Path, arm: str, options: Sequence[str]) -> Iterator[str]:
    """A Baton until the block ends; its address. Its logs and what it counted of its tiers are in `out` then."""
    with tempfile.TemporaryDirectory(prefix="baton-sessions-") as data:
        command = [sys.executable, "-m", "services.up", "--model", str(model), "--port", str(port)]
        command += ["--device", device, "--prefill", "0", "--decode", "1", "--data-dir", data, *options]
        try:
            with serving(command, cwd=ROOT, log=out / f"{arm}_up.log", ready_s=START_S):
                url = f"http://127.0.0.1:{port}"
                yield url
                metrics = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
                lines = [line for line in metrics if line.startswith(TOLD)]
                (out / f"{arm}_metrics.txt").write_text("\n".join(lines) + "\n")
        finally:
            for log in Path(data, "logs").glob("*.log"):
                (out / f"{arm}_{log.name}").write_text(log.read_text(errors="replace")[-200_000:])


def token_bytes(model: Path, device: str) -> float:
    """Bytes that a token keeps in blocks of tokens."""
    if device.startswith("fake"):
        return 2 * 2 * HEAD_DIM * 4  # keys and values of two layers
    spec = read_model_spec(model, device=device)
    parts = page_parts(spec, spec.dtype if device != "cpu" else "float32")
    return sum(part.block_bytes(16) for part in parts if part.per_token) / 16
