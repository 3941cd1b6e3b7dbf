"""A product around a product, as an adapter is: layers ask it for its input form and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.formats.forms import PLAIN, InputForm, Rows
from engine.formats.product import Linear
from engine.kernels.activation import act_and_mul
from engine.model.layers.branch import Branch
from engine.model.layers.norm import RmsNorm
from engine.model.stream import Stream
from engine.spec.model import BranchSpec
from tests.unit.engine.test_branch import SIZE, eight_bit_floats

RANK = 4


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


def test_an_adapter_around_a_rounded_product_takes_part_in_an_mlp() -> None:
    torch.manual_seed(1)
    up, down = _adapted(eight_bit_floats(2 * SIZE), 2 * SIZE), eight_bit_floats(SIZE)
    norm = RmsNorm(torch.ones(SIZE, dtype=torch.bfloat16), 1e-5)
    half = Branch(BranchSpec(before="norm"), before=norm, after=None, scalar=None, is_read_again=False)
    residual = torch.randn(3, SIZE).bfloat16()
    stream = Stream(residual.clone())
    half.add_gated(stream, up, down, "silu")
    expected = residual.float() + down(up.gated(norm(residual))).float()
    torch.testing.assert_close(stream.whole().float(), expected, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(expected, residual.float() + down(up.inner.gated(norm(residual))).float(), atol=0.05)
