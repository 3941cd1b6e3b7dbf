"""Implementations of an op side by side: ours, plain torch, torch's own kernels and libraries', beside the floor.

    python -m benchmarks.kernels --op all --out DIR          each op in a process of its own, within --time-limit seconds
    python -m benchmarks.kernels --op mla-decode --only FlashInfer
    TRITON_INTERPRET=1 python -m benchmarks.kernels --op delta-rule --tiny      errors, on a CPU

A time is the median of replays of a CUDA graph after the L2 cache was overwritten; "eager" where the implementation reads its
tensors on the host. An error is |result - exact| / |exact| against float64, of some rows.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks import environment
from benchmarks.kernels.ops import attention, delta, libraries, mla, products
from benchmarks.kernels.ops.comparing import NO_ERROR, OURS, PLAIN, Comparison, Limits, Row, compare, limits_of
from benchmarks.results_format import Result, ResultsPage, notes_of

OPS: dict[str, Callable[..., Iterator[Comparison]]] = {
    "attention-decode": attention.decode,
    "attention-prefill": attention.prefill,
    "linear-fp8": products.linear_fp8,
    "experts-fp8": products.experts_fp8,
    "mla-decode": mla.decode,
    "delta-rule": delta.delta_rules,
}
STEM, ALL = "kernels-ops", "all"
NO_TIME = "left out: no time"
UNKNOWN = Limits(bytes_per_s=1e12, flops_per_s=1e15, fp8_flops_per_s=1e15)  # where times don't count


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The part of an op's comparisons that is measured."""

    is_tiny: bool
    only: str = ""  # a pattern of implementations
    shapes: str = ""


@torch.inference_mode()
def rows_of(op: str, device: torch.device, chosen: Chosen, limits: Limits, until: float) -> Iterator[Row]:
    """Measure an op's implementations, shape by shape; those that begin after `until` are left out."""
    # Triton's interpreter computes in float16: it reads some results in bfloat16 as float32.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    torch.manual_seed(0)
    for comparison in OPS[op](device, dtype, is_tiny=chosen.is_tiny):
        if not re.search(chosen.shapes, comparison.shape):
            continue
        for name in comparison.implementations:
            if not re.search(chosen.only, name):
                continue
            if time.monotonic() > until:
                floor = limits.floor_us(comparison)
                yield Row(op=op, shape=comparison.shape, implementation=name, floor_us=floor, remark=NO_TIME)
                continue
            yield compare(comparison, name, limits, device, dtype)


def cell_of(row: Row) -> str:
    """A row's figures in a few words."""
    if row.us is None:
        return row.remark
    error = "" if row.error == NO_ERROR else f", {row.error * 1e3:.2f}e-3"
    return f"{row.us:.1f} us ({row.floor_us / row.us:.0%}{'' if row.is_captured else ', eager'}{error})"


def side_by_side(rows: Sequence[Row]) -> str:
    """A markdown table for each op: a line a shape, a column an implementation."""
    parts = ["## Side by side\n\nIn brackets the share of the floor that is reached, and the relative error.\n"]
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        names = list(dict.fromkeys(row.implementation for row in own))
        parts.append(f"### {op}\n\n| shape | floor | {' | '.join(names)} |\n|---|--:|{'--:|' * len(names)}")
        for shape in dict.fromkeys(row.shape for row in own):
            found = {row.implementation: row for row in own if row.shape == shape}
            floor = next(iter(found.values())).floor_us
            cells = [cell_of(found[name]) if name in found else "" for name in names]
            parts.append(f"| {shape} | {floor:.1f} us | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts) + "\n"


def fill(page: ResultsPage, rows: Sequence[Row], kept_notes: str) -> None:
    """Put the rows on the page; the best of the libraries is the reference of ours."""
    results, remarks = [], dict[str, list[str]]()
    for row in rows:
        if row.us is None:
            remarks.setdefault(f"{row.op}, {row.implementation}: {row.remark}", []).append(row.shape)
            continue
        others = [
            other.us
            for other in rows
            if (other.op, other.shape) == (row.op, row.shape)
            and not other.implementation.startswith((OURS, PLAIN))
            and other.us is not None
        ]
        results.append(
            Result(
                name=f"{row.op} {row.shape}: {row.implementation}",
                value=row.us,
                unit="us",
                better="lower",
                floor=row.floor_us,
                reference=min(others, default=None) if row.implementation == OURS else None,
            )
        )
    page.results = results
    page.remarks = [f"{said} ({', '.join(shapes)})" for said, shapes in remarks.items()]
    page.notes = side_by_side(rows) + kept_notes
    page.write()


def main(arguments: Sequence[str]) -> int:
    """Print each row as it is measured, then tables; a failed implementation is a row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--op", required=True, choices=[*OPS, ALL], help="the op to compare")
    parser.add_argument("--out", type=Path, help=f"folder for {STEM}.md and {STEM}.json")
    parser.add_argument(
        "--time-limit", type=float, default=240.0, metavar="S", help="start nothing after so many seconds"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only implementations with such names")
    parser.add_argument("--shapes", default="", metavar="REGEX", help="only shapes with such names")
    parser.add_argument("--compile", action="store_true", help="fill the caches of kernels: floors are not measured")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="what the page says where git is missing")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # where a process of --op all leaves its rows
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.time_limit
    device = environment.device_of("benchmarks.kernels", options.device)
    rows = list[Row]()
    page = None
    kept = "" if options.out is None else notes_of(STEM, options.out)
    if options.out is not None:
        facts = environment.describe("benchmarks.kernels", arguments, device, commit=options.commit)
        facts["libraries"] = ", ".join(f"{name}: {said}" for name, said in libraries.described().items())
        page = ResultsPage(options.out, STEM, title="Ops and their implementations", facts=facts)
    measured = _apart(options, until) if options.op == ALL else _here(options, device, until)
    for row in measured:
        print(f"{row.op:18}{row.shape:28}{row.implementation:48}{cell_of(row)}", flush=True)
        rows.append(row)
        if options.rows is not None:
            options.rows.write_bytes(msgspec.json.encode(rows))
        elif page is not None:
            fill(page, rows, kept)
    print("\n" + side_by_side(rows))
    return 0


def _here(options: argparse.Namespace, device: torch.device, until: float) -> Iterator[Row]:
    chosen = Chosen(is_tiny=options.tiny, only=options.only, shapes=options.shapes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limits = UNKNOWN if options.compile else limits_of(device, dtype)
    yield from rows_of(options.op, device, chosen, limits, until)


def _apart(options: argparse.Namespace, until: float) -> Iterator[Row]:
    """Measure each op in a process of its own: a kernel that ends a CUDA context ends that op alone."""
    with tempfile.TemporaryDirectory() as folder:
        for number, op in enumerate(OPS):
            left = max(1.0, (until - time.monotonic()) / (len(OPS) - number))
            file = Path(folder) / f"{op}.json"
            command = [sys.executable, "-m", "benchmarks.kernels", "--op", op, "--rows", str(file)]
            command += ["--only", options.only, "--shapes", options.shapes, "--device", options.device]
            command += ["--time-limit", str(left), *(["--tiny"] if options.tiny else [])]
            said = ""
            try:
                code = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=left + 30, check=False).returncode
                said = f"failed: the process ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                said = "failed: the process had to be ended"
            yield from msgspec.json.decode(file.read_bytes(), type=list[Row]) if file.is_file() else []
            if said:
                yield Row(op=op, shape="rest", implementation="all", floor_us=1.0, remark=said)
