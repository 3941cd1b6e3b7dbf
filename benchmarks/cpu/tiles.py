"""A product with a matrix in tiles of 4 to 8 bits on a CPU, in each of the variants that this processor has.

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
from engine.formats.tiled import allocated
from engine.kernels.quantised import tiles
from engine.kernels.quantised.tiles import Tiles, Variant

MIB_IN_TURN, ROUNDS = 128, 7
ROWS = (1, 2, 4, 8, 32, 512)
SHAPES = ((1536, 576), (8192, 2048))  # [N, K]: SmolLM2's gate, Llama 3.2 1B's
KINDS = {"4 bits": "Q4_K", "levels": "IQ4_XS", "5 bits": "Q5_K", "6 bits": "Q6_K", "8 bits": "Q8_0"}  # of GGUF
VARIANTS = tiles.variants()


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments, __doc__, "cpu_tiles", ROWS)
    facts = describe("benchmarks.cpu.tiles", sys.argv[1:], torch.device("cpu"))
    lines = heading("Products with tiles of 4 to 8 bits on a CPU", facts, f"the best of {ROUNDS} rounds in turn, ms")
    text = "\n".join(lines) + "\n" + "\n\n".join(_table(shape, options.rows) for shape in SHAPES) + "\n"
    print(text)
    keep(options.out, "cpu_tiles", text)
    return 0


def kinds(outputs: int, inputs: int) -> dict[str, Product]:
    """A random matrix [N, K] in each kind's tiles, multiplied in each way."""
    return {
        f"{name}, {variant.name}": lambda x, weight=weight, variant=variant: product(x, weight, variant)
        for name, weight in ((name, drawn(outputs, inputs, kind)) for name, kind in KINDS.items())
        for variant in VARIANTS
    }


def product(x: torch.Tensor, weight: Tiles, variant: Variant) -> torch.Tensor:
    tiles.variant = lambda: variant
    return tiles.product(x, weight, None)


def drawn(outputs: int, inputs: int, kind: str) -> Tiles:
    """A random matrix in the tiles of a GGUF file's kind."""
    weight = allocated(outputs, inputs, kind=kind, device=torch.device("cpu"))
    codes = torch.randint(0, 1 << weight.bits, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // weight.group)
    tiles.put(weight, 0, codes, scales, -scales if weight.has_minimums else None)
    return weight


def _table(shape: tuple[int, int], rows: Sequence[int]) -> str:
    copies = -(-(MIB_IN_TURN << 20) // (shape[0] * shape[1]))
    return by_rows(shape, [kinds(*shape) for _ in range(copies)], rows, ROUNDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
