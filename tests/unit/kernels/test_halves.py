"""Products of floats with matrices of 16-bit floats, by the kernel in C, against float64."""

from __future__ import annotations

from itertools import product as every

import pytest
import torch

from engine.kernels import native
from engine.kernels.native import halves
from engine.kernels.native.halves import Halves
from tests.unit.kernels.in_c import check_forked, check_threads_at_once, drawn

pytestmark = pytest.mark.skipif(not native.is_suitable() or not halves.is_usable(), reason="no C compiler, or no AVX2")

needs_pairs = pytest.mark.skipif(not halves.multiplies_pairs(), reason="no AVX512-BF16, or AMX beside it")
SIZES = [(1, 1), (5, 3), (31, 70), (32, 128), (33, 129), (160, 64), (173, 300), (400, 257)]  # outputs, inputs
ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 16, 17, 95, 96, 97, 200]


@pytest.fixture(params=[False, True], ids=["AVX2", "AVX-512"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either variant, where the processor has it."""
    if request.param and not halves.is_wide():
        pytest.skip("no AVX-512")
    monkeypatch.setattr(halves, "is_wide", lambda: request.param)


def stored(
    outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16, *, in_pairs: bool = False
) -> tuple[torch.Tensor, Halves]:
    """A matrix of 16-bit floats, and itself in order."""
    weight = drawn(outputs, inputs).to(dtype)
    return weight, halves.packed(weight.clone(), in_pairs=in_pairs)


def check_products(weight: torch.Tensor, packed: Halves, *, rows_in: torch.dtype, atol: float) -> None:
    """Products of rows rounded to `rows_in` are those in float64, plain, with a bias, and added to a residual."""
    outputs, inputs = weight.shape
    for count in ROWS:
        x, bias, residual = drawn(count, inputs), drawn(outputs), drawn(count, outputs, seed=1)
        wanted = x.to(rows_in).double() @ weight.double().T
        for its in (None, bias):
            whole = wanted if its is None else wanted + its.double()
            torch.testing.assert_close(halves.product(x, packed, its), whole.float(), rtol=1e-5, atol=atol)
            onto = residual.clone()
            assert halves.product(x, packed, its, out=onto, adds=True) is onto
            torch.testing.assert_close(onto, (residual + whole).float(), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", halves.DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_same_numbers(
    size: tuple[int, int], dtype: torch.dtype, variant: None, threads: None
) -> None:
    weight, packed = stored(*size, dtype)
    check_products(weight, packed, rows_in=torch.float32, atol=2e-5)


@needs_pairs
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_in_pairs_are_those_of_rounded_rows(size: tuple[int, int], threads: None) -> None:
    weight, packed = stored(*size, in_pairs=True)
    check_products(weight, packed, rows_in=torch.bfloat16, atol=5e-5)


@needs_pairs
def test_errors_in_pairs_are_no_larger_than_those_of_bfloat16() -> None:
    weight, packed = stored(64, 4096, in_pairs=True)
    for count in (1, 9, 40):
        x = drawn(count, 4096)
        wanted = x.double() @ weight.double().T
        own, plain = (each - wanted for each in (halves.product(x, packed, None), x.bfloat16() @ weight.T))
        assert own.square().mean() <= plain.square().mean()


@pytest.mark.parametrize("dtype", halves.DTYPES, ids=str)
def test_errors_are_no_larger_than_those_of_float32(dtype: torch.dtype, variant: None) -> None:
    weight, packed = stored(64, 4096, dtype)
    for count in (1, 9, 40):
        x = drawn(count, 4096)
        wanted = x.double() @ weight.double().T
        own, plain = (each - wanted for each in (halves.product(x, packed, None), x @ weight.float().T))
        assert own.square().mean() <= 2 * plain.square().mean()


@pytest.mark.parametrize("dtype", halves.DTYPES, ids=str)
@pytest.mark.parametrize("size", [(173, 300), (64, 96), (20, 140)], ids=str)
def test_a_row_depends_on_nothing_but_itself(
    size: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    """Neither on its batch, nor on the number of threads, nor on the processor, nor on what lies between rows."""
    _, packed = stored(*size, dtype)
    x, bias = drawn(211, size[1]), drawn(size[0])
    alone = torch.cat([halves.product(row[None], packed, bias) for row in x])
    among_others = torch.cat((x, drawn(211, 5)), dim=1)[:, : size[1]]
    for is_wide, count in every([False, True] if halves.is_wide() else [False], (1, 3)):
        monkeypatch.setattr(halves, "is_wide", lambda is_wide=is_wide: is_wide)
        torch.set_num_threads(count)
        for several in (*range(1, 26), 96, 97, 193, 211):
            own = slice(211 - several, 211)
            assert torch.equal(halves.product(x[own], packed, bias), alone[own]), (is_wide, count, several)
        assert torch.equal(halves.product(among_others, packed, bias), alone)


@needs_pairs
@pytest.mark.parametrize("size", [(173, 301), (64, 512), (300, 260)], ids=str)
def test_a_row_in_pairs_depends_on_nothing_but_itself(size: tuple[int, int], threads: None) -> None:
    _, packed = stored(*size, in_pairs=True)
    x, bias = drawn(401, size[1]), drawn(size[0])
    alone = torch.cat([halves.product(row[None], packed, bias) for row in x])
    among_others = torch.cat((x, drawn(401, 5)), dim=1)[:, : size[1]]
    for count in (1, 3):
        torch.set_num_threads(count)
        for several in (*range(1, 26), 191, 192, 193, 384, 401):
            own = slice(401 - several, 401)
            assert torch.equal(halves.product(x[own], packed, bias), alone[own]), (count, several)
        assert torch.equal(halves.product(among_others, packed, bias), alone)


@pytest.mark.parametrize("in_pairs", [False, pytest.param(True, marks=needs_pairs)])
@pytest.mark.parametrize("size", [(173, 300), (64, 96)], ids=str)
def test_an_output_does_not_depend_on_the_others(size: tuple[int, int], in_pairs: bool) -> None:
    """Ranks have some outputs each."""
    weight, packed = stored(*size, in_pairs=in_pairs)
    x = drawn(9, size[1])
    whole = halves.product(x, packed, None)
    for first, last in ((0, 7), (7, 50), (size[0] // 2, size[0])):
        own = halves.packed(weight[first:last].clone(), in_pairs=in_pairs)
        assert torch.equal(halves.product(x, own, None), whole[:, first:last])


def test_every_number_of_16_bits_is_widened_exactly(variant: None) -> None:
    codes = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(512, 128)
    for dtype in halves.DTYPES:
        weight = codes.view(dtype)
        packed = halves.packed(weight.clone())
        torch.testing.assert_close(packed.rows(torch.arange(512)), weight.float(), rtol=0, atol=0, equal_nan=True)
        finite = torch.where(weight.isfinite(), weight, torch.zeros((), dtype=dtype))
        for count in (128, 1):  # each row picks an input
            found = halves.product(torch.eye(128)[:count], halves.packed(finite.clone()), None)
            assert torch.equal(found, finite.float().T[:count])


@pytest.mark.parametrize(("dtype", "in_pairs"), [*((each, False) for each in halves.DTYPES), (torch.bfloat16, True)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_are_those_of_the_matrix(size: tuple[int, int], dtype: torch.dtype, in_pairs: bool, threads: None) -> None:
    weight, packed = stored(*size, dtype, in_pairs=in_pairs)
    numbers = torch.randint(0, size[0], (70,))
    assert torch.equal(packed.rows(numbers), weight[numbers].float())
    assert packed.rows(numbers[:0]).shape == (0, size[1])


@pytest.mark.parametrize("number", [-1, 5])
def test_a_row_that_there_is_not_is_refused(number: int) -> None:
    with pytest.raises(IndexError, match="a matrix of 5 rows"):
        stored(5, 3, torch.bfloat16)[1].rows(torch.tensor([0, number]))


@pytest.mark.parametrize("in_pairs", [False, pytest.param(True, marks=needs_pairs)])
@pytest.mark.parametrize("outputs", [1, 31, 33, 64])
@pytest.mark.parametrize("count", [2, 20])
def test_nothing_is_written_beside_a_product(
    outputs: int, count: int, in_pairs: bool, variant: None, threads: None
) -> None:
    _, packed = stored(outputs, 130, in_pairs=in_pairs)
    x, out = drawn(count, 130), torch.full((count, outputs + 16), 7.0)
    halves.product(x, packed, None, out=out[:, 8 : 8 + outputs])
    assert torch.equal(out[:, 8 : 8 + outputs], halves.product(x, packed, None))
    assert bool((out[:, :8] == 7).all() and (out[:, 8 + outputs :] == 7).all())


@pytest.mark.parametrize("in_pairs", [False, pytest.param(True, marks=needs_pairs)])
def test_no_rows_give_none(in_pairs: bool) -> None:
    assert halves.product(drawn(0, 3), stored(5, 3, in_pairs=in_pairs)[1], None).shape == (0, 5)


def test_what_does_not_go_together_is_refused() -> None:
    _, packed = stored(4, 6, torch.bfloat16)
    with pytest.raises(ValueError, match="rows of 5 inputs"):
        halves.product(drawn(2, 5), packed, None)
    for out in (torch.zeros(2, 3), torch.zeros(1, 4), torch.zeros(4, 2).T):
        with pytest.raises(ValueError, match="don't go into"):
            halves.product(drawn(2, 6), packed, None, out=out)
    for weight in (torch.zeros(4, 6), torch.zeros(6, 4, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="16-bit floats"):
            halves.packed(weight)
    with pytest.raises(ValueError, match="pairs are of bfloat16"):
        halves.packed(torch.zeros(4, 6, dtype=torch.float16), in_pairs=True)


def test_what_is_no_number_stays_none(variant: None) -> None:
    """A broken weight shows in its outputs alone, and in all rows of them."""
    weight = drawn(40, 8).half()
    weight[3, 2], weight[35, 1] = torch.nan, torch.inf
    for count in (1, 5, 40):
        found = halves.product(drawn(count, 8), halves.packed(weight.clone()), None)
        assert (~found.isfinite()).all(0).nonzero().flatten().tolist() == [3, 35]
        assert found[:, :3].isfinite().all()


@needs_pairs
def test_what_is_no_number_stays_none_in_pairs() -> None:
    """A broken weight, and a broken row."""
    weight, x = drawn(40, 7).bfloat16(), drawn(40, 7)
    weight[3, 2], weight[35, 6], x[1, 4] = torch.nan, torch.inf, torch.nan
    for count in (2, 5, 40):
        found = halves.product(x[:count], halves.packed(weight.clone(), in_pairs=True), None)
        assert found[1].isnan().all()
        found = torch.cat((found[:1], found[2:]))
        assert (~found.isfinite()).all(0).nonzero().flatten().tolist() == [3, 35]
        assert found[:, :3].isfinite().all()


@pytest.mark.parametrize("in_pairs", [False, pytest.param(True, marks=needs_pairs)])
def test_threads_may_multiply_at_once(in_pairs: bool, threads: None) -> None:
    _, packed = stored(400, 96, in_pairs=in_pairs)
    x = drawn(9, 96)
    check_threads_at_once(lambda: halves.product(x, packed, None))


def test_a_forked_process_multiplies_too(threads: None) -> None:
    _, packed = stored(400, 96, torch.bfloat16)
    x = drawn(3, 96)
    check_forked(lambda: halves.product(x, packed, None))
