"""Experts in floats of 4 bits on a CPU: products are those of the numbers that the codes stand for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.kernels.quantised import slabs
from engine.kernels.quantised.groups import E2M1
from engine.kernels.quantised.slabs import Slabs, allocate, plain, product, put

LEVELS = torch.tensor((*E2M1, *(-level for level in E2M1)), dtype=torch.float64)


def drawn(rows: int, inputs: int, *, parts: int = 1) -> tuple[Slabs, torch.Tensor]:
    """A matrix that was put in several parts, and its numbers [N, K] in float64."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(-40, 4, (rows, inputs // 32), generator=generator)
    scales = torch.exp2(exponents.float())
    weight = allocate((1, rows, inputs))[0]
    for begin in range(0, rows, rows // parts):
        part = slice(begin, begin + rows // parts)
        put(weight, begin, codes[part], scales[part])
    return weight, LEVELS[codes.long()] * scales.double().repeat_interleave(32, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "parts"), [(4, 32, 1), (96, 64, 2), (200, 96, 1), (320, 160, 4)])
def test_a_product_is_that_of_the_numbers(
    rows: int, inputs: int, parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "_ELEMENTS", 96 * inputs)  # 320 rows are four slabs, and the last one is not full
    weight, numbers = drawn(rows, inputs, parts=parts)
    bias = torch.linspace(-1, 1, rows, dtype=torch.float64)
    for count in (1, 2, 17):
        x = torch.randn((count, inputs), generator=torch.Generator().manual_seed(count)).to(dtype)
        expected = x.double() @ numbers.T + bias
        found = product(x, weight, bias.to(dtype))
        assert (found.shape, found.dtype) == ((count, rows), dtype)
        assert (found.double() - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm()


def test_threads_take_whole_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_ELEMENTS", 32 * 64)  # ten slabs
    weight, _ = drawn(320, 64)
    x, make, seen = torch.randn(3, 64), slabs._plain, set[int]()

    def plain_slab(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return make(codes, scales, dtype)

    monkeypatch.setattr(slabs, "_plain", plain_slab)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = product(x, weight, None)
        torch.set_num_threads(3)
        assert torch.equal(product(x, weight, None), expected)
        assert (seen, torch.get_num_threads()) == ({1}, 3)
        with ThreadPoolExecutor(1) as another:
            assert another.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_nothing_is_rounded() -> None:
    weight, numbers = drawn(96, 64, parts=3)
    assert torch.equal(plain(weight, torch.float64), numbers)
    one_by_one = torch.eye(64)
    for dtype in (torch.float32, torch.bfloat16):
        found = product(one_by_one.to(dtype), weight, None)
        assert torch.equal(found.T.double(), numbers)


def test_four_bits_and_a_scale_is_all_that_is_kept() -> None:
    shape = (2, 5760, 2880)
    weight = allocate(shape)
    assert weight.num_bytes == 2 * 5760 * 2880 * (4 + 16 / 32) / 8
    assert (weight[1].inputs, weight.outputs, weight.width) == (2880, 5760, 160)


def test_sizes_that_do_not_suit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 4 rows and of 32 inputs, not 6, 40"):
        allocate((1, 6, 40))
