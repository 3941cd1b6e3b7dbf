"""A product with a matrix in tiles of 4 and 8 bits on a CPU, in each of the variants that this processor has.

    python -m benchmarks.cpu.tiles --out benchmarks/results

Each in CPU time of one thread, in turn, over copies of the matrix that no cache holds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.cpu.in_turn import Product, by_rows, options_of
from benchmarks.environment import describe
from benchmarks.tables import heading, keep
from engine.kernels.quantised import tiles
from engine.kernels.quantised.tiles import Tiles, Variant

MIB_IN_TURN, ROUNDS = 128, 7
ROWS = (1, 2, 4, 8, 32, 512)
SHAPES = ((1536, 576), (8192, 2048))  # [N, K]: SmolLM2's gate, Llama 3.2 1B's
GROUP = 32
VARIANTS = tiles.variants()


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments, __doc__, "cpu_tiles", ROWS)
    facts = describe("benchmarks.cpu.tiles", sys.argv[1:], torch.device("cpu"))
    lines = heading("Products with tiles of 4 and 8 bits on a CPU", facts, f"the best of {ROUNDS} rounds in turn, ms")
    text = "\n".join(lines) + "\n" + "\n\n".join(_table(shape, options.rows) for shape in SHAPES) + "\n"
    print(text)
    keep(options.out, "cpu_tiles", text)
    return 0


def kinds(outputs: int, inputs: int) -> dict[str, Product]:
    """A random matrix [N, K] of each width, multiplied in each way."""
    weights = {bits: drawn(outputs, inputs, bits) for bits in (4, 8)}
    return {
        f"{bits} bits, {variant.name}": lambda x, weight=weight, variant=variant: product(x, weight, variant)
        for bits, weight in weights.items()
        for variant in VARIANTS
    }


def product(x: torch.Tensor, weight: Tiles, variant: Variant) -> torch.Tensor:
    tiles.variant = lambda: variant
    return tiles.product(x, weight, None)


def drawn(outputs: int, inputs: int, bits: int) -> Tiles:
    """A random matrix; 4 bits have minimums, as in Q4_1, 8 have none, as in Q8_0."""
    weight = tiles.allocate(outputs, inputs, bits=bits, group=GROUP, has_minimums=bits == 4)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // GROUP)
    tiles.put(weight, 0, codes, scales, -scales if bits == 4 else None)
    return weight


def _table(shape: tuple[int, int], rows: Sequence[int]) -> str:
    copies = -(-(MIB_IN_TURN << 20) // (shape[0] * shape[1]))
    return by_rows(shape, [kinds(*shape) for _ in range(copies)], rows, ROUNDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
