"""Products with 8-bit weights: exact in whole numbers, close to float64, and a row doesn't depend on its batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from engine.kernels.norm import rms_norm
from engine.kernels.quantised.int8 import (
    MOST_INPUTS,
    ZERO,
    Int8,
    Int8Product,
    exact_product,
    gated_rows,
    multiplies_bytes,
    normed_rows,
    product,
    product_onto,
    quantise,
    quantised,
)

SHAPES = [(1152, 896), (896, 4864), (40, 24), (1, 1), (33, 1030)]
MOST_PLAIN = 160  # outputs; float32 is slow, and its slabs have 128
ROWS = 120  # two slabs of the most inputs


@pytest.fixture(params=["here", "plain"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As this processor multiplies, and as one without instructions for bytes does."""
    if request.param == "plain":
        monkeypatch.setattr("engine.kernels.quantised.int8.multiplies_bytes", lambda: False)
    return str(request.param)


def numbers(matrix: Int8) -> torch.Tensor:
    """The numbers that its codes stand for, [N, K] float64."""
    return matrix.codes.double() * matrix.scales.double()[:, None] * matrix.columns.double()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_float64(outputs: int, inputs: int, dtype: torch.dtype, way: str) -> None:
    outputs = min(outputs, MOST_PLAIN) if way == "plain" else outputs
    matrix, x = quantise(torch.randn(outputs, inputs)), torch.randn(9, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    exact = x.double() @ numbers(matrix).T
    got = product(x, Int8Product.of(matrix), bias)
    assert got.dtype == dtype
    allowed = 1e-4 if dtype == torch.float32 else 0.006  # what rounding the result to bfloat16 makes
    assert (got.double() - exact - bias.double()).norm() < allowed * (exact.norm() + bias.double().norm())
    assert torch.equal(product(x, Int8Product.of(matrix), bias, out=torch.empty_like(got)), got)


def test_rows_of_codes_are_multiplied_exactly(way: str) -> None:
    """Extreme codes, which a processor that adds up in 16 bits gets wrong."""
    matrix = quantise(torch.full((64, 2048), -3.0))
    x = torch.stack((torch.full((2048,), 5.0), -torch.full((2048,), 0.5), torch.zeros(2048)))
    got = product(x, Int8Product.of(matrix), None)
    torch.testing.assert_close(got, torch.tensor([-30720.0, 3072.0, 0.0])[:, None].expand(3, 64), rtol=1e-6, atol=0)


def test_a_large_activation_takes_no_digits_from_the_others() -> None:
    """Real models have a few features a hundred times as large as the rest."""
    weight, x = torch.randn(64, 512), torch.randn(8, 512)
    weight[:, 7] /= 100
    x[:, 7] *= 100
    error = product(x, Int8Product.of(quantise(weight)), None) - x @ weight.T
    assert error.norm() < 0.01 * (x @ weight.T).norm()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(outputs: int, inputs: int, dtype: torch.dtype, way: str) -> None:
    outputs = min(outputs, MOST_PLAIN) if way == "plain" else outputs
    weight = Int8Product.of(quantise(torch.randn(outputs, inputs)))
    x = torch.randn(ROWS, inputs).mul_(torch.logspace(-3, 3, ROWS)[:, None]).to(dtype)
    whole, turned = product(x, weight, None), product(x.flip(0), weight, None).flip(0)
    assert torch.equal(whole, turned)
    for count in (1, 2, 3, 7, 33, ROWS - 1):
        assert torch.equal(product(x[:count], weight, None), whole[:count])
        assert torch.equal(product(x[-count:], weight, None), whole[-count:])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_fused_with_products_is_close_and_alone_as_in_a_batch(dtype: torch.dtype, bias: bool) -> None:
    features, size, tokens = 96, 160, 200
    x = torch.randn(tokens, features).mul_(torch.logspace(-2, 2, tokens)[:, None]).to(dtype)
    norm = torch.randn(features).to(dtype)
    gate_up, down = (quantise(torch.randn(shape) / 8) for shape in ((2 * size, features), (features, size)))
    first, second = ((0.3 * torch.randn(count)).to(dtype) if bias else None for count in (2 * size, features))

    def computed(x: torch.Tensor) -> torch.Tensor:
        residual = x.clone()
        wide, narrow = Int8Product.of(gate_up), Int8Product.of(down)
        rows = normed_rows(x, norm, 1e-6, wide.columns, plus_one=bias)
        product_onto(residual, gated_rows(rows, wide, first, "silu", narrow.columns), narrow, second)
        return residual

    got = computed(x)
    normed = rms_norm.reference(x.double(), norm.double(), 1e-6, plus_one=bias)
    wide, narrow = numbers(gate_up), numbers(down)
    gate, up = (normed @ wide.T + (0.0 if first is None else first.double())).chunk(2, dim=-1)
    added = (silu(gate) * up) @ narrow.T + (0.0 if second is None else second.double())
    error = (got.double() - x.double() - added).norm(dim=1) / added.norm(dim=1)
    assert error[x.abs().amax(dim=1) < 1].max() < 0.01, "a larger residual rounds the sum"
    for count in (1, 2, 7, 65, 199):
        assert torch.equal(computed(x[:count]), got[:count])
        assert torch.equal(computed(x[-count:]), got[-count:])


def test_many_rows_are_cut_into_slabs() -> None:
    weight = Int8Product.of(quantise(torch.randn(8000, 16)))
    x = torch.randn(600, 16)
    whole = product(x, weight, None)
    assert torch.equal(torch.cat([product(row, weight, None) for row in x.split(100)]), whole)


def test_a_weight_s_largest_number_has_the_largest_code() -> None:
    weight = torch.randn(50, 24)
    weight[:, 5] /= 1000
    matrix = quantise(weight)
    assert matrix.codes.abs().amax(dim=1).eq(127).all()
    assert ((numbers(matrix) - weight).abs() <= 0.5001 * matrix.scales[:, None] * matrix.columns).all()
    assert (numbers(matrix) - weight)[:, 5].norm() < 0.02 * weight[:, 5].norm(), "small columns keep their digits"
    rows = torch.tensor([3, 3, 49])
    torch.testing.assert_close(matrix.floats(rows, torch.float64), numbers(matrix)[rows], rtol=1e-6, atol=0)


def test_rows_of_zeros_and_of_tiny_and_huge_numbers() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [3e38, -1.5e38], [1.0, float("nan")]])
    rows = quantised(x, torch.float32)
    low, high = rows.codes[:3].int().unbind(1)
    assert ((high - ZERO) * 256 + low - ZERO).tolist() == [[0, 0], [0, 0], [32639, -16319]]
    assert torch.isfinite(rows.steps[:3]).all()
    assert torch.isnan(product(x, Int8Product.of(quantise(torch.ones(1, 2))), None)[3]).all(), "no number is made up"


def test_sums_are_exact_up_to_the_most_inputs() -> None:
    codes = torch.full((2, MOST_INPUTS), 255, dtype=torch.uint8)
    weight = torch.full((3, MOST_INPUTS), -127, dtype=torch.int8)
    assert torch.equal(exact_product(codes, weight), torch.full((2, 3), -127.0 * 127.0 * MOST_INPUTS))
    if multiplies_bytes():
        scales, zeros = torch.ones(3), torch.zeros(3, dtype=torch.int64)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        got = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        assert torch.equal(got, exact_product(codes, weight))
    with pytest.raises(ValueError, match="int8 takes"):
        quantise(torch.empty(1, MOST_INPUTS + 1))
