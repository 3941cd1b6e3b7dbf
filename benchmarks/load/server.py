"""A server of one worker for a run of loads: `baton up` with random weights of Llama-3.1-8B's shape."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.load.cells import Cell, Device, chat
from benchmarks.load.client import Served, send, served_at
from benchmarks.simulate.trace import TraceRequest
from benchmarks.up import serving
from benchmarks.weights.checkpoint import served_checkpoint
from services.runtime.servers import free_port

SHAPE = "llama-3.1-8b"
FLAGS: Mapping[Device, Sequence[str]] = {
    "bf16": (),
    "fp8": ("--quantization", "fp8", "--kv-cache-dtype", "fp8"),
}
READY_S = 240.0
WARM_PER_SECOND = 9.5
LENGTHS, ANSWER = (40, 700, 1500, 3000, 6000, 12_000, 24_000, 300), 16
TAIL_CHARACTERS = 200_000


@contextmanager
def one_worker(
    device: Device, card: str, *, model: Path | None, checkpoints: Path, out: Path, up: str
) -> Iterator[Served]:
    """A whole Baton with one worker of both roles on `card`, until the block ends; its logs go to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"server-{device}.log"
    began = time.monotonic()
    folder = model or served_checkpoint(checkpoints, SHAPE)
    _say(began, f"checkpoint {folder}")
    flags = () if card == "cpu" else FLAGS[device]  # the same code; its figures say nothing
    with tempfile.TemporaryDirectory(prefix="baton-load-") as data:
        port = free_port()
        command = [sys.executable, "-m", "services.up", "--model", str(folder), "--port", str(port), "--device", card]
        command += ["--prefill", "0", "--decode", "1", "--data-dir", data, *flags, *up.split()]
        try:
            with serving(command, cwd=ROOT, log=log, ready_s=READY_S):
                _say(began, f"{device}: ready, {' '.join(command[3:])}")
                vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
                yield served_at(f"http://127.0.0.1:{port}", "", vocabulary)
        finally:
            with log.open("a") as opened:
                for each in sorted(Path(data, "logs").glob("*.log")):
                    opened.write(f"\n== {each.name}\n{each.read_text(errors='replace')[-TAIL_CHARACTERS:]}")


async def warm(served: Served, seconds: float) -> None:
    """Send what every server has seen in its first minute: turns and long prompts, none of them a load's own."""
    for requests in (chat(WARM_PER_SECOND), _prompts_of_all_lengths):
        await send(Cell("warm", "bf16", requests), served, seconds=seconds, traces=None)


def _prompts_of_all_lengths(seconds: float, _: Path | None) -> list[TraceRequest]:
    return [TraceRequest(1000 * seconds * at / len(LENGTHS), n, ANSWER, ()) for at, n in enumerate(LENGTHS)]


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)
