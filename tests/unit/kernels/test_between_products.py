"""Kernels in C between products with tiles: norms, gates, rotations, attention of single queries, beside plain torch."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import native, norm, rope
from engine.kernels.activation import act_and_mul
from engine.kernels.attention import on_cpu, reference
from engine.kernels.attention.plan import AttentionBatch, Scores
from engine.kernels.codes import Codes
from engine.kernels.quantised import tiles
from engine.kernels.rope import Heads

pytestmark = pytest.mark.skipif(not native.is_suitable() or not tiles.is_usable(), reason="no C compiler, or no AVX2")

ULPS = 4e-7  # a few units in the last place


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_is_that_of_float64_and_of_its_row_alone(plus_one: bool) -> None:
    x, weight = torch.randn(70, 576) * torch.logspace(-6, 6, 70)[:, None], torch.randn(576)
    found = norm.rms_norm_in_c(x, weight, 1e-5, plus_one=plus_one)
    wide = x.double()
    factors = weight.double() + plus_one
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factors
    assert ((found - expected).abs() <= 2 * ULPS * expected.abs() + 1e-12).all()
    torch.testing.assert_close(found, norm.rms_norm.reference(x, weight, 1e-5, plus_one=plus_one), rtol=1e-5, atol=1e-7)
    for row in (0, 33, 69):
        assert torch.equal(norm.rms_norm_in_c(x[row : row + 1], weight, 1e-5, plus_one=plus_one)[0], found[row])


@pytest.mark.parametrize("activation", tiles.GATES)
def test_a_gate_is_torch_s_to_some_units_in_the_last_place(activation: str) -> None:
    weight = tiles.allocate(64, 32, bits=8, group=32, has_minimums=False)
    codes = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    tiles.put(weight, 0, codes, torch.full((64, 1), 0.01))
    x = torch.randn(20, 32) * torch.logspace(-4, 2, 20)[:, None]
    sums = tiles.product(x, weight, None)
    found = tiles.gated_product(x, weight, None, activation)
    expected = act_and_mul.reference(sums.double(), activation)
    assert ((found - expected).abs() <= 4 * ULPS * expected.abs() + 1e-6 * sums.abs().amax()).all()
    assert torch.equal(found[7:8], tiles.gated_product(x[7:8], weight, None, activation))


def test_a_gate_of_nothing_finite_says_so() -> None:
    weight = tiles.allocate(16, 32, bits=8, group=32, has_minimums=False)
    tiles.put(weight, 0, torch.ones(16, 32, dtype=torch.int8), torch.ones(16, 1))
    bias = torch.zeros(16)
    bias[0], bias[1], bias[2] = float("nan"), float("inf"), -1000.0
    found = tiles.gated_product(torch.ones(1, 32), weight, bias, "silu")[0]
    assert found[0].isnan()
    assert found[1].isinf()
    assert found[2].abs() < 1e-30


def test_a_product_is_added_as_torch_would_add_it() -> None:
    weight = tiles.allocate(104, 96, bits=4, group=32, has_minimums=True)
    codes = torch.randint(0, 16, (104, 96), dtype=torch.uint8)
    tiles.put(weight, 0, codes, torch.rand(104, 3), torch.randn(104, 3))
    for rows in (1, 9, 70):
        x, residual = torch.randn(rows, 96), torch.randn(rows, 104)
        expected = residual + tiles.product(x, weight, None)
        tiles.product(x, weight, None, out=residual, adds=True)
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_rotated_heads_and_the_pool_have_torch_s_bits(
    size: int, in_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, heads, kv_heads, block = 37, 6, 2, 4
    qkv, angles = torch.randn(rows, (heads + 2 * kv_heads) * size), torch.rand(90, size // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 90, (rows,), dtype=torch.int32)
    slots = torch.randperm(60)[:rows].int()
    slots[5] = -1
    qkv[7, -3:] = torch.tensor([1e6, -1e6, float("nan")])
    codes = Codes(torch.float32, torch.ones(2), in_half=True) if in_half else None
    found = []
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(native, "library", lambda: None)
        pool, given = torch.full((15, 3, 2, block, kv_heads, size), 7.0), qkv.clone()
        pool = pool.half() if in_half else pool
        q = rope.rope_and_write_kv.reference(
            given, positions, cos_sin, slots, pool[:, 1], Heads(), codes=codes, is_spare=True
        )
        found.append((q.clone(), pool.nan_to_num(5.0)))
    assert all(torch.equal(own, its) for own, its in zip(*found, strict=True))


@pytest.mark.parametrize("how", [Scores(scale=0.2), Scores(scale=0.2, window=70), Scores(scale=0.2, window=-64)])
@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(64, 9, 3), (128, 40, 2), (80, 4, 4), (256, 2, 1)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("codes", [None, Codes(torch.float32, torch.ones(2), in_half=True)], ids=["float32", "float16"])
def test_attention_of_single_queries(
    how: Scores, size: int, heads: int, kv_heads: int, has_sinks: bool, codes: Codes | None
) -> None:
    block, lengths = 16, [1, 8, 64, 65, 200]
    if has_sinks:
        how = Scores(scale=how.scale, window=how.window, sinks=torch.randn(heads))
    pool = torch.full((80, 3, 2, block, kv_heads, size), float("nan"))[:, 1]
    table = torch.randperm(80)[:65].view(5, 13).int()
    for row, length in enumerate(lengths):
        for position in range(length):
            pool[table[row, position // block], :, position % block] = torch.randn(2, kv_heads, size)
    pool = pool if codes is None else pool.half()
    wider = torch.randn(5, heads + 2, size)
    q = wider[:, :heads]
    batch = _of(lengths, table)
    assert on_cpu._is_native(q, pool, batch, how)
    assert not on_cpu._is_native(q, pool, _of(lengths, table.long()), how), "its words are of 32 bits"
    found, threads = on_cpu.attend(q, pool, batch, how, codes), torch.get_num_threads()
    torch.testing.assert_close(found, reference.attend(q, pool, batch, how, codes), rtol=1e-5, atol=1e-5)
    try:
        torch.set_num_threads(2)
        assert torch.equal(on_cpu.attend(q, pool, batch, how, codes), found)
    finally:
        torch.set_num_threads(threads)
    for row, length in enumerate(lengths):
        alone = on_cpu.attend(q[row : row + 1], pool, _of([length], table[row : row + 1]), how, codes)
        assert torch.equal(alone[0], found[row])


def _of(lengths: list[int], table: torch.Tensor) -> AttentionBatch:
    """A batch of single queries."""
    return AttentionBatch(
        query_start=torch.arange(len(lengths) + 1, dtype=torch.int32),
        context_len=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        max_query_len=1,
        max_context_len=max(lengths),
    )
