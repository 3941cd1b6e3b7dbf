"""Sums and gathers among GPUs of one host: microseconds by size, beside a copy of the same bytes to every peer.

    python -m benchmarks.collectives --devices 0,1 --out DIR     two cards; within a minute
    python -m benchmarks.collectives --devices 0,0               two processes on one card: that it runs, not how fast

A time is the median of replays of a graph that holds 20 of the same operation, on the slowest rank. The copy moves what one-shot
operations send: no sum of large messages needs as much.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import environment, tables
from benchmarks.collectives.ranks import run_ranks

TIMEOUT_S = 300.0
OPERATIONS = ("copy", "all_reduce", "all_reduce_norm", "gather")


def main(arguments: Sequence[str]) -> int:
    """Print the table, and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="0,1", help="a rank's card each, by number")
    parser.add_argument("--out", type=Path, help="folder for the page and the figures")
    parser.add_argument("--commit", default="", help="what the page calls this version, where there is no git")
    options = parser.parse_args(arguments)
    devices = [int(each) for each in options.devices.split(",")]
    facts = environment.describe(
        "benchmarks.collectives",
        arguments,
        environment.device_of("benchmarks.collectives", "cuda:0"),
        commit=options.commit,
    )
    told = run_ranks("benchmarks.collectives.measure", devices, timeout_s=TIMEOUT_S)
    if any(each is None for each in told):
        print("a rank failed or took too long", file=sys.stderr)
        return 1
    slowest = {name: max(each[name] for each in told) for name in told[0]}
    sizes = sorted({int(name.rpartition("_")[2]) for name in slowest})
    rows = {
        f"{size / 1024:g} KiB": [
            f"{slowest[cell]:.1f}" if (cell := f"{each}_{size}") in slowest else "–" for each in OPERATIONS
        ]
        for size in sizes
    }
    title = f"Collectives among {len(devices)} ranks: microseconds"
    text = "\n".join([*tables.heading(title, facts), *tables.table("message", OPERATIONS, rows), ""])
    print(text)
    tables.keep(options.out, f"collectives-{len(devices)}", text, slowest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
