"""One layer of gpt-oss-20b's experts on a CPU: in MXFP4, and plain as they were before they stayed there.

    python -m benchmarks.cpu.experts --out benchmarks/results

32 experts of 2880 by 2880, four a token, with random weights, the same in each expert's own memory, and tokens that choose at
random. Times are of a call: of the wall, and in brackets of all processors.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.environment import describe
from benchmarks.tables import heading, keep, table
from engine.kernels.experts import Clamp, Experts, mixture
from engine.kernels.experts.mixture import Matrices, gated
from engine.kernels.experts.routing import Choice
from engine.kernels.quantised import slabs
from engine.kernels.quantised.slabs import Slabs

EXPERTS, CHOSEN, SIZE = 32, 4, 2880
TOKENS, ROUNDS = (1, 8, 512), 3
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GPT_OSS = Clamp(alpha=1.702, limit=7.0)


class Row(NamedTuple):
    weights: str
    threads: int
    tokens: int
    wall_ms: float
    cpu_ms: float
    error: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for cpu_experts.md")
    parser.add_argument("--size", type=int, default=SIZE, help="features of a token, and of an expert")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args(arguments)
    kept = _experts(options.size)
    rows, sizes = list[Row](), {"MXFP4": _mib(kept)}
    for name, dtype in DTYPES.items():
        plain = _plain(kept, dtype)
        sizes[f"plain {name}"] = _mib(plain)
        for label, experts in ((f"plain {name}", plain), (f"MXFP4, {name}", kept)):
            for threads in options.threads:
                torch.set_num_threads(threads)
                rows += _measured(label, experts, dtype, kept, options.size)
        del plain, experts
    text = page(sizes, rows)
    print(text)
    keep(options.out, "cpu_experts", text)
    return 0


def _measured(label: str, experts: Experts, dtype: torch.dtype, exact: Experts, size: int) -> list[Row]:
    found = []
    x, choice = _drawn(2, size, dtype, seed=0)
    expected = _in_float64(x, choice, exact)
    error = float((mixture(x, choice, experts).double() - expected).norm() / expected.norm())
    for tokens in TOKENS:
        inputs = [_drawn(tokens, size, dtype, seed=seed) for seed in range(ROUNDS + 1)]
        times = [_timed(x, choice, experts) for x, choice in inputs][1:]  # the first warms up
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        found.append(Row(label, torch.get_num_threads(), tokens, wall, cpu, error))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _timed(x: torch.Tensor, choice: Choice, experts: Experts) -> tuple[float, float]:
    """Milliseconds of the wall, and of all processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    mixture(x, choice, experts)
    return 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)


def _experts(size: int) -> Experts:
    generator = torch.Generator().manual_seed(0)

    def matrices(rows: int) -> Slabs:
        experts = slabs.allocate((EXPERTS, rows, size))
        codes = torch.randint(0, 16, (rows, size), dtype=torch.uint8, generator=generator)
        exponents = torch.randint(-8, -4, (rows, size // slabs.GROUP), generator=generator)
        slabs.put(experts[0], 0, codes, torch.exp2(exponents.float()))
        experts.codes.view(torch.int16)[1:] = experts.codes.view(torch.int16)[0]
        experts.scales[1:] = experts.scales[0]
        return experts

    return Experts(gate_up=matrices(2 * size), down=matrices(size), clamp=GPT_OSS)


def _plain(kept: Experts, dtype: torch.dtype) -> Experts:
    def matrices(of: Matrices) -> torch.Tensor:
        return _matrix(of, 0, dtype).repeat(EXPERTS, 1, 1)

    return replace(kept, gate_up=matrices(kept.gate_up), down=matrices(kept.down))


def _matrix(of: Matrices, expert: int, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(of, Slabs)
    return slabs.plain(of[expert], dtype)


def _drawn(tokens: int, size: int, dtype: torch.dtype, *, seed: int) -> tuple[torch.Tensor, Choice]:
    generator = torch.Generator().manual_seed(1000 * tokens + seed)
    x = torch.randn((tokens, size), generator=generator).to(dtype)
    logits = torch.randn((tokens, EXPERTS), generator=generator)
    best = logits.topk(CHOSEN, dim=1)
    return x, Choice(best.indices.to(torch.int32), best.values.softmax(dim=1))


def _in_float64(x: torch.Tensor, choice: Choice, experts: Experts) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(choice.ids.tolist(), choice.weights.double(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (_matrix(experts.gate_up, expert, torch.float64) @ x[token].double()).chunk(2)
            inner = gated(gate, up, experts.clamp)
            out[token] += weight * (_matrix(experts.down, expert, torch.float64) @ inner)
    return out


def _mib(experts: Experts) -> float:
    return sum(_bytes(each) for each in (experts.gate_up, experts.down)) / 2**20


def _bytes(matrices: Matrices) -> int:
    assert isinstance(matrices, Slabs | torch.Tensor)
    return matrices.num_bytes if isinstance(matrices, Slabs) else matrices.nbytes


def page(sizes: dict[str, float], rows: Sequence[Row]) -> str:
    facts = describe("benchmarks.cpu.experts", sys.argv[1:], torch.device("cpu"))
    facts["device"] = f"CPU, {platform.machine()}, {os.cpu_count()} processors"
    lines = heading("A layer of gpt-oss-20b's experts on a CPU", facts, f"medians of {ROUNDS} calls")
    lines += table("weights", ["MiB a layer"], {name: [f"{size:,.0f}"] for name, size in sizes.items()})
    lines += ["", f"| weights | threads | {' | '.join(f'{count} tokens, ms' for count in TOKENS)} | relative error |"]
    lines += [f"|---|--:|{'--:|' * len(TOKENS)}--:|"]
    for weights, threads in dict.fromkeys((row.weights, row.threads) for row in rows):
        own = [row for row in rows if (row.weights, row.threads) == (weights, threads)]
        cells = " | ".join(f"{row.wall_ms:,.1f} ({row.cpu_ms:,.1f})" for row in own)
        lines.append(f"| {weights} | {threads} | {cells} | {own[0].error:.1e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
