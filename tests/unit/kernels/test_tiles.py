"""Products with matrices in tiles, by the kernel in C, against whole numbers and float64."""

from __future__ import annotations

from itertools import product as every

import pytest
import torch

from engine.kernels import native
from engine.kernels.quantised import tiles
from engine.kernels.quantised.gguf_blocks import INT4_LEVELS
from engine.kernels.quantised.tiles import Tiles, Variant
from engine.processor import BOUND
from tests.unit.kernels.in_c import check_forked, check_threads_at_once

pytestmark = pytest.mark.skipif(not native.is_suitable() or not tiles.is_usable(), reason="no C compiler, or no AVX2")

OUTPUTS, INPUTS = 8 * 13, 96  # no whole number of pairs of tiles
LEVELS = 0  # in place of bits
KINDS = [
    *every((4, 8), (16, 32), (False, True)),
    *every((5,), (32,), (False, True)),
    *every((6,), (16,), (False, True)),
    (LEVELS, 32, False),
]


def packed(bits: int, group: int, has_minimums: bool, *, outputs: int = OUTPUTS) -> tuple[Tiles, torch.Tensor]:
    """A random matrix in tiles, and as float64 [N, K]. 8-bit codes have the smallest one, the others the largest."""
    torch.manual_seed(bits + group + has_minimums)
    if bits == 8:
        codes = torch.randint(-128, 128, (outputs, INPUTS), dtype=torch.int8)
    else:
        codes = torch.randint(0, 1 << (bits or 4), (outputs, INPUTS), dtype=torch.uint8)
    scales = torch.rand(outputs, INPUTS // group).half()
    minimums = torch.randn(outputs, INPUTS // group).half() if has_minimums else None
    weight = tiles.allocate(
        outputs, INPUTS, bits=bits or 4, group=group, has_minimums=has_minimums, has_levels=bits == LEVELS
    )
    for begin in (0, 8):  # in two parts
        rows = slice(begin, begin + 8 if begin == 0 else outputs)
        tiles.put(
            weight, begin, codes[rows], scales[rows].float(), None if minimums is None else minimums[rows].float()
        )
    centred = codes.double() - weight.middle
    if bits == LEVELS:
        centred = torch.tensor(INT4_LEVELS, dtype=torch.float64)[codes.int()]
    matrix = centred.unflatten(1, (-1, group)) * scales.double()[:, :, None]
    return weight, (matrix if minimums is None else matrix + minimums.double()[:, :, None]).flatten(1)


def as_rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, K] as its 8-bit codes have it, in float64."""
    groups = x.unflatten(1, (-1, tiles.OF_ROWS))
    largest = groups.abs().amax(2, keepdim=True)
    codes = torch.where(largest > 0, groups * (127 / largest), torch.zeros(())).round()
    return (codes.double() * (largest / 127).double()).flatten(1)


@pytest.mark.parametrize(("bits", "group", "has_minimums"), KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 15, 70])
def test_a_product_is_that_of_rounded_rows(bits: int, group: int, has_minimums: bool, num_rows: int) -> None:
    weight, matrix = packed(bits, group, has_minimums)
    x, bias = torch.randn(num_rows, INPUTS), torch.randn(OUTPUTS)
    found, expected = tiles.product(x, weight, bias), as_rounded(x) @ matrix.T + bias.double()
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("variant", tiles.variants())
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 32), (5, 32), (6, 16), (8, 16), (8, 32)])
def test_sums_of_the_largest_codes_fit(
    bits: int, group: int, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "variant", lambda: variant)
    for largest in (-128, 127) if bits == 8 else ((1 << bits) - 1,):
        weight = tiles.allocate(16, 32, bits=bits, group=group, has_minimums=True)
        codes = torch.full((16, 32), largest, dtype=torch.int8 if bits == 8 else torch.uint8)
        tiles.put(weight, 0, codes, torch.ones(16, 32 // group), torch.zeros(16, 32 // group))
        for sign in (-1.0, 1.0):
            found = tiles.product(torch.full((9, 32), sign * 127), weight, None)
            assert torch.equal(found, torch.full((9, 16), sign * 127 * 32 * largest))


@pytest.mark.parametrize(("bits", "group", "has_minimums"), KINDS)
def test_a_row_depends_on_nothing_but_itself(
    bits: int, group: int, has_minimums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on its batch, nor on the number of threads, nor on how many bytes a processor multiplies at a time."""
    weight, _ = packed(bits, group, has_minimums)
    x = torch.randn(70, INPUTS)
    alone, threads = torch.cat([tiles.product(row[None], weight, None) for row in x]), torch.get_num_threads()
    try:
        for variant, count, several in every(tiles.variants(), (1, 2, 3), (1, 2, 3, 4, 7, 8, 70)):
            monkeypatch.setattr(tiles, "variant", lambda variant=variant: variant)
            torch.set_num_threads(count)
            assert torch.equal(tiles.product(x[:several], weight, None), alone[:several]), (variant, count, several)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("machine", "flags", "has_avx512", "limit", "expected"),
    [
        ("x86_64", set(), False, "", Variant.AVX2),
        ("x86_64", {"avx_vnni"}, False, "", Variant.AVX_VNNI),
        ("x86_64", {"avx_vnni"}, False, "AVX2_VNNI", Variant.AVX_VNNI),
        ("x86_64", {"avx_vnni"}, False, "avx2", Variant.AVX2),
        ("x86_64", {"avx_vnni"}, True, "", Variant.AVX512_VNNI),
        ("x86_64", {"avx512_vnni"}, False, "", Variant.AVX2),
        ("aarch64", set(), False, "", Variant.NEON),
        ("aarch64", {"asimddp"}, False, "", Variant.NEON_DOTPROD),
    ],
)
def test_a_processor_s_fastest_variant_is_chosen(
    machine: str, flags: set[str], has_avx512: bool, limit: str, expected: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(native, "features", lambda: native.NEEDED[machine] | flags)
    monkeypatch.setattr(tiles, "has_avx512", lambda: has_avx512)
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: True, raising=False)
    monkeypatch.setenv(BOUND, limit)
    assert tiles.variant.__wrapped__() is expected


@pytest.mark.parametrize(
    ("machine", "needed", "without"), [("x86_64", tiles.VEX, Variant.AVX2), ("aarch64", tiles.DOTTED, Variant.NEON)]
)
def test_a_processor_without_one_of_the_instructions_does_without_its_variant(
    machine: str, needed: frozenset[str], without: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(tiles, "has_avx512", lambda: False)
    for missing in needed:
        monkeypatch.setattr(native, "features", lambda missing=missing: needed - {missing})
        assert tiles.variant.__wrapped__() is without


@pytest.mark.parametrize(("bits", "group", "has_minimums"), KINDS)
def test_rows_of_a_table_are_those_of_the_matrix(bits: int, group: int, has_minimums: bool) -> None:
    weight, matrix = packed(bits, group, has_minimums)
    numbers = torch.tensor([0, 103, 8, 9, 0])
    assert (weight.rows(numbers) - matrix[numbers]).abs().max() < 1e-5


def test_a_column_of_a_wider_result_is_written_in_place() -> None:
    weight, _ = packed(4, 32, True)
    x, out = torch.randn(5, INPUTS), torch.full((5, OUTPUTS + 16), 7.0)
    tiles.product(x, weight, None, out=out[:, 8 : 8 + OUTPUTS])
    assert torch.equal(out[:, 8 : 8 + OUTPUTS], tiles.product(x, weight, None))
    assert bool((out[:, :8] == 7).all() and (out[:, 8 + OUTPUTS :] == 7).all())


def test_zeros_and_denormal_rows_are_zeros() -> None:
    weight, _ = packed(4, 32, True)
    assert not tiles.product(torch.zeros(2, INPUTS), weight, None).any()
    assert not tiles.product(torch.full((2, INPUTS), 1e-40), weight, None).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("bits", "group", "has_minimums"), KINDS)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_row_that_is_no_number_makes_none_wherever_it_is(
    value: float, bits: int, group: int, has_minimums: bool, num_rows: int
) -> None:
    weight, _ = packed(bits, group, has_minimums)
    for place in range(tiles.OF_ROWS + 1):
        x = torch.randn(num_rows, INPUTS)
        expected = tiles.product(x, weight, None)
        x[0, place] = value
        found = tiles.product(x, weight, None)
        assert not found[0].isfinite().any(), place
        assert torch.equal(found[1:], expected[1:])


def test_threads_may_multiply_at_once() -> None:
    weight, _ = packed(8, 32, False, outputs=8 * 64)
    x = torch.randn(9, INPUTS)
    check_threads_at_once(lambda: tiles.product(x, weight, None))


def test_a_forked_process_multiplies_too(threads: None) -> None:
    weight, _ = packed(4, 32, False, outputs=8 * 64)
    x = torch.randn(3, INPUTS)
    check_forked(lambda: tiles.product(x, weight, None))


def test_sizes_and_scales_that_do_not_suit_are_refused() -> None:
    for outputs, inputs, group in ((12, 96, 32), (16, 48, 16), (16, 96, 64)):
        with pytest.raises(ValueError, match="tiles have 8 outputs"):
            tiles.allocate(outputs, inputs, bits=4, group=group, has_minimums=False)
    for bits, group in ((5, 16), (6, 32)):
        with pytest.raises(ValueError, match="tiles have 8 outputs"):
            tiles.allocate(8, 96, bits=bits, group=group, has_minimums=False)
    weight = tiles.allocate(8, 32, bits=4, group=32, has_minimums=False)
    with pytest.raises(ValueError, match="64 inputs don't go with a matrix of 32"):
        tiles.product(torch.zeros(1, 64), weight, None)
    with pytest.raises(ValueError, match="too large for float16"):
        tiles.put(weight, 0, torch.zeros(8, 32, dtype=torch.uint8), torch.full((8, 1), 1e6))
