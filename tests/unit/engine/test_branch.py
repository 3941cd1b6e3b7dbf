"""How a half of a layer chooses who rounds what its products read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.formats.forms import PLAIN, InputForm, Rows
from engine.formats.fp8 import Fp8Linear
from engine.formats.grouped import Grouped
from engine.formats.product import Linear
from engine.kernels.activation import act_and_mul
from engine.kernels.quantised.fp8 import FP8, Fp8Matrix
from engine.kernels.quantised.groups import pack
from engine.model.layers.norm import RmsNorm
from engine.model.stream import Branch, Stream
from engine.spec.model import BranchSpec

SIZE = 256
RANK = 4


def _floats(rows: int) -> Fp8Linear:
    weight = torch.randn(rows, SIZE).to(FP8)
    return Fp8Linear(Fp8Matrix(weight, torch.full((rows,), 0.01)), None)


def _codes(rows: int) -> Grouped:
    codes = torch.randint(0, 16, (rows, SIZE), dtype=torch.int32)
    return Grouped(pack(codes, torch.full((rows, SIZE // 128), 0.01), bits=4, group=128), None)


@dataclass(frozen=True)
class Adapted:
    """A low-rank product [T, K] -> [T, N] beside another product, of whatever format."""

    inner: Linear
    down: torch.Tensor  # [RANK, K]
    up: torch.Tensor  # [N, RANK]

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return PLAIN

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        total = self.inner(x) + x @ self.down.T @ self.up.T
        return total if out is None else out.copy_(total)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return self(x)

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return act_and_mul(self(x), activation)

    def gated_as(self, form: InputForm, x: torch.Tensor, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))


def _adapted(inner: Linear, rows: int) -> Adapted:
    return Adapted(inner, torch.randn(RANK, SIZE).bfloat16(), torch.randn(rows, RANK).bfloat16() * 0.1)


def test_halves_that_read_the_same_take_an_mlp_in_two_formats() -> None:
    """On a CPU 8-bit floats are rounded and codes are not: what is read once must not be asked for again."""
    norm = RmsNorm(torch.ones(SIZE, dtype=torch.bfloat16), 1e-5)
    up, down = _floats(2 * SIZE), _codes(SIZE)
    stream = Stream(torch.randn(3, SIZE).bfloat16())
    first = Branch(BranchSpec(before="norm"), before=norm, after=None, scalar=None, is_read_again=True)
    second = Branch(BranchSpec(shares=True), before=None, after=None, scalar=None, is_read_again=False)
    read, before = first.read(stream), stream.whole()
    second.add_gated(stream, up, down, "silu")
    expected = before.float() + down(up.gated(read)).float()
    torch.testing.assert_close(stream.whole().float(), expected, rtol=2e-2, atol=2e-2)


def test_an_adapter_around_a_rounded_product_takes_part_in_an_mlp() -> None:
    torch.manual_seed(1)
    up, down = _adapted(_floats(2 * SIZE), 2 * SIZE), _floats(SIZE)
    norm = RmsNorm(torch.ones(SIZE, dtype=torch.bfloat16), 1e-5)
    half = Branch(BranchSpec(before="norm"), before=norm, after=None, scalar=None, is_read_again=False)
    residual = torch.randn(3, SIZE).bfloat16()
    stream = Stream(residual.clone())
    half.add_gated(stream, up, down, "silu")
    expected = residual.float() + down(up.gated(norm(residual))).float()
    torch.testing.assert_close(stream.whole().float(), expected, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(expected, residual.float() + down(up.inner.gated(norm(residual))).float(), atol=0.05)
