"""A product with 4-bit weights on a CPU: torch's kernel for them, or rows of 8 bits made of them while loading, or plain numbers.

    python -m benchmarks.cpu.four_bits --out benchmarks/results

Each in CPU time of one thread, in turn, over copies of the matrix that no cache holds. Groups have 128 inputs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch

from benchmarks.cpu.in_turn import Product, milliseconds, options_of
from benchmarks.environment import describe
from benchmarks.tables import heading, keep, table
from engine.formats.int4 import quantise_groups
from engine.kernels import linear
from engine.kernels.quantised import int8

GROUP, MIB_IN_TURN, ROUNDS = 128, 64, 5
ROWS = (1, 2, 8, 64)
SHAPES = ((4096, 4096), (896, 4864))  # [N, K]: a square one, and Qwen2.5 0.5B's down
DTYPES = (torch.bfloat16, torch.float32)


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments, __doc__, "four_bits", ROWS)
    tables = [
        _table(f"{outputs} x {inputs}, {str(dtype).removeprefix('torch.')}", options.rows, (outputs, inputs), dtype)
        for outputs, inputs in SHAPES
        for dtype in DTYPES
    ]
    text = page(tables)
    print(text)
    keep(options.out, "four_bits", text)
    return 0


def kinds(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> dict[str, Product]:
    """The same codes [N, K], multiplied in each way."""
    values = (codes.float() - 8).unflatten(1, (-1, GROUP)).mul_(scales.float()[..., None]).flatten(1)
    plain, rows = linear.packed(values.to(dtype)), int8.Int8Product.of(int8.quantise(values))
    four = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    of_groups = torch.stack([scales.T, torch.zeros_like(scales.T)], dim=2).to(dtype).contiguous()
    return {
        "torch's kernel of 4 bits": lambda x: torch._weight_int4pack_mm_for_cpu(x, four, GROUP, of_groups),
        "rows of 8 bits": lambda x: int8.product(x, rows, None),
        "plain": lambda x: linear.linear(x, plain, None),
    }


def _table(title: str, rows: Sequence[int], shape: tuple[int, int], dtype: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(0)
    copies = -(-(MIB_IN_TURN << 20) * 2 // (shape[0] * shape[1]))  # of half a byte an element
    codes, scales = quantise_groups(torch.randn(shape, generator=generator), GROUP)
    ways = [kinds(codes, scales, dtype) for _ in range(copies)]
    cells = {}
    for count in rows:
        x = torch.randn((count, shape[1]), generator=generator).to(dtype)
        times = milliseconds(ways if count <= 8 else ways[:1], x, ROUNDS + 1)  # more rows are bound by arithmetic
        own = {name: statistics.median(each[1:]) for name, each in times.items()}  # the first warms up
        print(title, count, own, file=sys.stderr, flush=True)
        cells[f"{count} rows, ms"] = [f"{each:.3g}" for each in own.values()]
    return "\n".join(table(title, ways[0], cells))


def page(tables: Sequence[str]) -> str:
    facts = describe("benchmarks.cpu.four_bits", sys.argv[1:], torch.device("cpu"))
    lines = heading("Products with 4-bit weights on a CPU", facts, f"medians of {ROUNDS} rounds")
    return "\n".join(lines) + "\n" + "\n\n".join(tables) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
