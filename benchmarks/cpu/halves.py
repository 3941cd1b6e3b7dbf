"""A product of floats with a matrix of 16-bit floats on a CPU: by the kernel in C, and by torch with float32 weights or bfloat16.

    python -m benchmarks.cpu.halves --out benchmarks/results

Each in CPU time of one thread, in turn, over copies of the matrix that no cache holds. ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2 has the kernel's other variant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from benchmarks.cpu.in_turn import Product, by_rows, options_of
from benchmarks.environment import describe
from benchmarks.tables import heading, keep
from engine.kernels import linear
from engine.kernels.native import halves

MIB_IN_TURN, ROUNDS = 256, 7
ROWS = (1, 2, 4, 8, 32, 512)
SHAPES = ((4096, 4096), (1536, 576), (128256, 2048))  # [N, K]: a square one, SmolLM2's gate, Llama 3.2 1B's head
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments, __doc__, "cpu_halves", ROWS)
    facts = describe("benchmarks.cpu.halves", sys.argv[1:], torch.device("cpu"))
    limits = ", ".join(f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ) or "none"
    facts |= {"instructions": "AVX-512" if halves.is_wide() else "AVX2", "limits of these": limits}
    lines = heading(
        "Products with 16-bit weights in float32 on a CPU", facts, f"the best of {ROUNDS} rounds in turn, ms"
    )
    text = "\n".join(lines) + "\n" + "\n\n".join(_table(shape, options.rows) for shape in SHAPES) + "\n"
    print(text)
    keep(options.out, "cpu_halves" if halves.is_wide() else "cpu_halves-avx2", text)
    return 0


def kinds(weight: torch.Tensor) -> dict[str, Product]:
    """The same matrix [N, K] in bfloat16, multiplied in each way."""
    wide, own, other = weight.float(), halves.packed(weight.clone()), halves.packed(weight.half())
    found: dict[str, Product] = {
        "float32": lambda x: linear.linear(x, wide, None),
        "bfloat16 in C": lambda x: halves.product(x, own, None),
        "float16 in C": lambda x: halves.product(x, other, None),
    }
    if halves.multiplies_pairs():
        pairs = halves.packed(weight.clone(), in_pairs=True)
        found["pairs of bfloat16 in C"] = lambda x: halves.product(x, pairs, None)
    if linear.computes_in_bfloat16():
        packed = linear.packed(weight.clone())
        found["bfloat16 rows, oneDNN"] = lambda x: linear.linear(x.bfloat16(), packed, None)
    return found


def _table(shape: tuple[int, int], rows: Sequence[int]) -> str:
    generator = torch.Generator().manual_seed(0)
    copies = -(-(MIB_IN_TURN << 20) // (2 * shape[0] * shape[1]))
    ways = [kinds(torch.randn(shape, generator=generator).bfloat16()) for _ in range(copies)]
    return by_rows(shape, ways, rows, ROUNDS, generator)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
