"""How a half of a layer chooses who rounds what its products read."""

from __future__ import annotations

import torch

from engine.formats.fp8 import Fp8Linear
from engine.formats.grouped import Grouped
from engine.kernels.quantised.fp8 import FP8, Fp8Matrix
from engine.kernels.quantised.groups import pack
from engine.model.layers.branch import Branch
from engine.model.layers.norm import RmsNorm
from engine.model.stream import Stream
from engine.spec.model import BranchSpec

SIZE = 256


def eight_bit_floats(rows: int) -> Fp8Linear:
    weight = torch.randn(rows, SIZE).to(FP8)
    return Fp8Linear(Fp8Matrix(weight, torch.full((rows,), 0.01)), None)


def _codes(rows: int) -> Grouped:
    codes = torch.randint(0, 16, (rows, SIZE), dtype=torch.int32)
    return Grouped(pack(codes, torch.full((rows, SIZE // 128), 0.01), bits=4, group=128), None)


def test_halves_that_read_the_same_take_an_mlp_in_two_formats() -> None:
    """On a CPU 8-bit floats are rounded and codes are not: what is read once must not be asked for again."""
    norm = RmsNorm(torch.ones(SIZE, dtype=torch.bfloat16), 1e-5)
    up, down = eight_bit_floats(2 * SIZE), _codes(SIZE)
    stream = Stream(torch.randn(3, SIZE).bfloat16())
    first = Branch(BranchSpec(before="norm"), before=norm, after=None, scalar=None, is_read_again=True)
    second = Branch(BranchSpec(shares=True), before=None, after=None, scalar=None, is_read_again=False)
    read, before = first.read(stream), stream.whole()
    second.add_gated(stream, up, down, "silu")
    expected = before.float() + down(up.gated(read)).float()
    torch.testing.assert_close(stream.whole().float(), expected, rtol=2e-2, atol=2e-2)
