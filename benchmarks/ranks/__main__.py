"""Ranks, or stages, on the cards of one host: what must be right, then collectives and steps of models, beside one card's.

    python -m benchmarks.ranks --devices 0,1 --out DIR          two cards (0,1,2,3: four): everything, within ten minutes
    python -m benchmarks.ranks --devices 0,0 --out DIR          two processes on one card: that it runs, not how fast
    python -m benchmarks.ranks --devices cpu,cpu --out DIR --quick    ranks on CPUs, the demo model
    python -m benchmarks.ranks --devices 0,1 --out DIR --stages       pipeline stages in place of ranks

Each part is a command of its own, which is printed, and ends in time. The exit code is that of the worst.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LIMIT_S = 585.0
CHECKS_S, COLLECTIVES_S = 200.0, 60.0
CELLS = "^(decode_b(1|32|64)_ctx1088|ttft_p2048|ttft_p8192)$"
SHAPE, WIDE_SHAPE, EXPERTS = "llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"


def commands(options: argparse.Namespace) -> Iterator[tuple[str, list[str], float]]:
    """Return the parts: a name, arguments of `python`, and the seconds that it may take."""
    devices, out, commit = options.devices, str(options.out), ["--commit", options.commit]
    on_cards = not devices.startswith("cpu")
    engine = ["-m", "benchmarks.engine", "--stages" if options.stages else "--ranks", devices, *commit]
    pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    if on_cards and options.stages:
        yield "checks of stages", [*pytest, "-n", "4", "tests/gpu/test_stages.py"], 2 * CHECKS_S
    elif on_cards:
        yield "checks of collectives", [*pytest, "tests/gpu/test_collectives.py"], CHECKS_S
        workers = ["-n", "4", "tests/gpu/test_ranks.py", "tests/gpu/test_widths.py"]  # only what is right, not how fast
        yield "checks of workers", [*pytest, *workers], CHECKS_S
        yield (
            "collectives",
            ["-m", "benchmarks.collectives", "--devices", devices, "--out", out, *commit],
            COLLECTIVES_S,
        )
    if options.quick:
        quick = ["--shape", "demo", "--quick", "--cells", "^decode_", "--device", "cuda" if on_cards else "cpu"]
        yield "demo", [*engine, *quick, "--out", f"{out}/demo"], 120.0
        return
    shapes = {SHAPE: 120.0, WIDE_SHAPE: 110.0} | ({} if options.stages else {EXPERTS: 110.0})
    for shape, limit_s in shapes.items():
        cells = ["--cells", CELLS, "--limit-s", str(limit_s - 30), "--max-sequences", "64"]
        yield shape, [*engine, "--shape", shape, *cells, "--out", f"{out}/{shape}"], limit_s
    if options.stages:
        return
    fp8 = ["--shape", WIDE_SHAPE, "--quantization", "fp8", "--cells", "^decode_b1_", "--max-sequences", "64"]
    yield f"{WIDE_SHAPE} fp8", [*engine, *fp8, "--limit-s", "60", "--out", f"{out}/{WIDE_SHAPE}-fp8"], 90.0


def main(arguments: Sequence[str]) -> int:
    """Run the parts one after the other, while there is time; return the worst exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="0,1", help="a rank's card each, by number; cpu,cpu: on CPUs")
    parser.add_argument("--out", type=Path, required=True, help="folder for pages and figures")
    parser.add_argument("--commit", default="", help="what the pages call this version, where there is no git")
    parser.add_argument("--stages", action="store_true", help="pipeline stages in place of ranks")
    parser.add_argument("--quick", action="store_true", help="the demo model alone")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    began, worst = time.monotonic(), 0
    for name, command, limit_s in commands(options):
        left = LIMIT_S - (time.monotonic() - began)
        print(f"[{time.monotonic() - began:6.1f} s] {name}: python {' '.join(command)}", flush=True)
        try:
            code = subprocess.run(
                [sys.executable, *command], timeout=max(1.0, min(limit_s, left)), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        print(f"[{time.monotonic() - began:6.1f} s] {name}: {'ok' if code == 0 else f'failed with {code}'}", flush=True)
        worst = max(worst, code if code >= 0 else 128 - code)  # as a shell counts an end by a signal
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
