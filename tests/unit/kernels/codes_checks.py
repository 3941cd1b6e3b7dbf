"""Checks of kernels over quantised keys and values. Like `triton_checks`; what a pool's codes mean is said by the twins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from engine.kernels import attention, rope
from engine.kernels.attention import triton_prefill
from engine.kernels.attention.triton_decode_codes import for_float16
from engine.kernels.codes import Codes, Kind, decoded, encoded, part_dims
from engine.kernels.launch import Kernel
from tests.unit.kernels import references
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import checking

KINDS: tuple[Kind, ...] = ("fp8", "int8", "int4")


def pool_of(numbers: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, Codes]:
    """Codes of `numbers` [num_blocks, 2, B, Hkv, D] in a pool of two layers, each block one run of bytes; the second layer's."""
    device, shape = numbers.device, numbers.shape
    factors = torch.tensor([0.03, 0.25], device=device) if kind == "fp8" else torch.ones(2, device=device)
    parts = [(getattr(torch, dtype), dim) for dtype, dim in part_dims(kind, shape[-1])]
    sizes = [2 * shape[1:-1].numel() * dim * dtype.itemsize for dtype, dim in parts]
    blocks = torch.full((shape[0], sum(sizes)), 0xFF, dtype=torch.uint8, device=device)
    pages, *scales = (
        own.view(dtype).unflatten(1, (2, *shape[1:-1], dim))[:, 1]
        for own, (dtype, dim) in zip(blocks.split(sizes, dim=1), parts, strict=True)
    )
    codes = Codes(numbers.dtype, factors, *scales)
    for plane in (0, 1):
        kept, steps = encoded(numbers[:, plane], plane, codes)
        pages[:, plane] = kept
        if codes.scales is not None and steps is not None:
            codes.scales[:, plane] = steps
    return pages, codes


def meant(pages: torch.Tensor, codes: Codes) -> torch.Tensor:
    return decoded(pages, codes.scales, codes.factors.view(2, 1, 1, 1), torch.float64)


def all_codes(device: str) -> Iterator[tuple[torch.Tensor, Codes]]:
    """Every byte, as a pool of one block."""
    every = torch.arange(256, dtype=torch.uint8, device=device).view(1, 2, 4, 1, 32)
    yield every.view(torch.float8_e4m3fn), Codes(torch.float16, torch.ones(2, device=device))
    scales = torch.rand(1, 2, 4, 1, 1, device=device)
    yield every, Codes(torch.float16, torch.ones(2, device=device), scales)
    yield (
        every,
        Codes(torch.float16, torch.ones(2, device=device), torch.randn(1, 2, 4, 1, 2, device=device).bfloat16()),
    )


def check_bytes(device: str) -> None:
    """Each byte becomes what torch makes of it."""
    blocks = torch.tensor([[0, 4]], dtype=torch.int32, device=device)
    for pages, codes in all_codes(device):
        found = torch.stack(triton_prefill.gather_context(pages, blocks, codes)).flatten()
        expected = decoded(pages, codes.scales, codes.factors.view(2, 1, 1, 1), codes.dtype).flatten()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check_writing(device: str) -> None:
    """Both kernels write what the twin writes, and leave in place what the pool holds."""
    plain, other = rope.Heads(), rope.Heads(interleaved=True)
    for kind, how, dtype in itertools.product(KINDS, (plain, other), (torch.float32, torch.float16)):
        for head_dim, tokens in ((64, 5), (80, 3), (16, 40)):
            _check_writing(kind, how, dtype, head_dim, tokens, device)


def _check_writing(kind: Kind, how: rope.Heads, dtype: torch.dtype, head_dim: int, tokens: int, device: str) -> None:
    q_heads, kv_heads, block_size = 3, 2, 4
    sizes = torch.exp(4 * torch.randn(tokens, q_heads + 2 * kv_heads, 1, device=device)).clamp(
        max=1000
    )  # fp8's ends, too
    qkv = (torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device=device) * sizes).to(dtype).flatten(1)
    qkv[0] = 0
    positions = torch.zeros(
        tokens, device=device, dtype=torch.int32
    )  # nothing turns, so that both round the same numbers
    cos_sin = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=-1).to(device)
    slots = torch.randperm(tokens + 8, device=device)[:tokens].int()
    slots[tokens // 2] = -1
    results = []
    for compute in (rope.rope_and_write_kv, rope.rope_and_write_kv.reference):
        nothing = torch.zeros(
            -(-tokens // block_size) + 2, 2, block_size, kv_heads, head_dim, device=device, dtype=dtype
        )
        pages, codes = pool_of(nothing, kind)
        given = qkv.clone()
        q = compute(given, positions, cos_sin, slots, pages, how, codes=codes, in_place=True)
        results.append((q, given, meant(pages, codes)))
    (ours_q, ours_given, ours), (theirs_q, theirs_given, theirs) = results
    close(ours_q / 1000, theirs_q.double() / 1000, dtype)
    # A quotient that is rounded otherwise may be the next code, once in a while.
    for found, expected in ((ours, theirs), (ours_given, theirs_given)):
        same = found.float().isclose(expected.float(), rtol=2e-3, atol=1e-6)
        assert same.float().mean() > 0.999, (kind, dtype, (~same).sum())
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=0.13, atol={"fp8": 0.01, "int8": 30.0, "int4": 600.0}[kind]
        )


def check_broken(device: str) -> None:
    """NaN stays NaN, in its own row alone."""
    for kind, how in itertools.product(KINDS, (rope.Heads(), rope.Heads(interleaved=True))):
        qkv = torch.randn(2, 3 * 32, device=device)
        qkv[0, 40] = qkv[0, 80] = float("nan")
        pages, codes = pool_of(torch.zeros(1, 2, 4, 1, 32, device=device), kind)
        slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
        table = torch.tensor([[1.0] * 16 + [0.0] * 16], device=device)
        rope.rope_and_write_kv(qkv, torch.zeros_like(slots), table, slots, pages, how, codes=codes)
        is_nan = meant(pages, codes).isnan().any(dim=-1)[0, :, :, 0]
        assert is_nan.tolist() == [[True, False, False, False]] * 2, (kind, how)


SOME = [(9, 9), (40, 85), (1, 30)]
ONE_EACH = [(1, 1), (1, 70), (1, 530)]


def check_decode(device: str) -> None:
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.float16)):
        _check_attention(kind, ONE_EACH, (4, 2), 64, dtype, device)
    for kind, head_dim in itertools.product(KINDS, (16, 80, 256)):
        _check_attention(kind, [(1, 20), (1, 3)], (2, 1), head_dim, torch.float16, device)
    for kind in KINDS:
        _check_attention(kind, [(1, 1100), (1, 4)], (2, 1), 16, torch.float32, device, window=64)
    for kind, heads in itertools.product(KINDS, ((4, 1), (2, 2))):
        _check_attention(kind, [(4, 4), (3, 66), (11, 259)], heads, 32, torch.float16, device, verify=True)


@triton.jit
def _queries(q, halves, undone, rows: tl.constexpr, pairs: tl.constexpr):
    at = tl.arange(0, rows)[:, None] * (2 * pairs) + 2 * tl.arange(0, pairs)[None, :]
    even, odd, times = for_float16(tl.load(q + at), tl.load(q + at + 1))
    tl.store(halves + at, even)
    tl.store(halves + at + 1, odd)
    tl.store(undone + tl.arange(0, rows), times)


def check_queries(device: str) -> None:
    """A query in bfloat16 keeps its bits, however large its row is, and loses next to nothing of what is much smaller."""
    q = torch.randn(16, 32, device=device) * torch.exp2(-torch.randint(0, 45, (16, 32), device=device).float())
    q = (q * torch.exp2(torch.linspace(-80, 120, 16, device=device))[:, None]).bfloat16()
    q[3] = 0
    halves, undone = torch.empty_like(q, dtype=torch.float16), torch.empty(16, device=device)
    Kernel(_queries).launch((1,), None, q, halves, undone, rows=16, pairs=16)
    wide, largest = q.double(), q.double().abs().amax(dim=1, keepdim=True)
    assert not (undone.log2() % 1).any()
    lost = (halves.double() * undone.double()[:, None] - wide).abs()
    assert not lost[wide.abs() >= largest * 2.0**-31].any()
    assert (lost <= largest * 2.0**-39).all()


def check_bfloat16(device: str) -> None:
    """Queries whose heads are of very different sizes, in fp8. The interpreter has no products of bfloat16, as int8 needs."""
    lengths = [(1, 1), (1, 70), (1, 530)]
    q, kv_layer, batch = references.attention_case(
        lengths, heads=(4, 2), head_dim=64, block_size=16, dtype=torch.bfloat16, device=device
    )
    pages, codes = pool_of(kv_layer, "fp8")
    plan = references.plan_of(q, batch, num_kv_heads=2, block_size=16, window=0, is_plain=True)
    q = (q * torch.tensor([[1e-30], [1e-3], [1.0], [5.0]], device=device)).bfloat16()
    out = attention.paged_attention(q, pages, plan, attention.Scores(scale=0.2), codes=codes)
    close(out, references.attention(q, meant(pages, codes), batch, 0.2, 0))


def check_no_numbers(device: str) -> None:
    """A value that is no number leaves no number of its head's outputs, and another head its own."""
    q, kv_layer, batch = references.attention_case(
        [(1, 70)], heads=(4, 2), head_dim=64, block_size=16, dtype=torch.float16, device=device
    )
    kv_layer[batch.block_table[0, 1], 1, 3, 0] = float("nan")
    pages, codes = pool_of(kv_layer, "fp8")
    plan = references.plan_of(q, batch, num_kv_heads=2, block_size=16, window=0, is_plain=True)
    out = attention.paged_attention(q.contiguous(), pages, plan, attention.Scores(scale=0.2), codes=codes)
    assert not out[:, :2].isfinite().any()
    assert out[:, 2:].isfinite().all()


def check_prompts(device: str) -> None:
    """Straight from the pool, and gathered for kernels that copy in bulk (16 bits)."""
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.float16)):
        _check_attention(kind, SOME, (4, 2), 64, dtype, device)
        _check_attention(kind, [(20, 150), (80, 80)], (2, 1), 16, dtype, device, window=20)
    for kind, head_dim in itertools.product(KINDS, (24, 80, 256, 512)):
        _check_attention(kind, [(5, 20), (2, 2)], (2, 1), head_dim, torch.float16, device)


def check_scores(device: str) -> None:
    for kind, lengths, dtype in itertools.product(KINDS, (ONE_EACH, SOME), (torch.float32, torch.float16)):
        sinks = 2 * torch.randn(4, device=device)
        _check_attention(kind, lengths, (4, 2), 64, dtype, device, window=20, softcap=1.5, sinks=sinks)


def check_large(device: str) -> None:
    """On a GPU alone."""
    for kind, dtype, head_dim in itertools.product(KINDS, (torch.float16, torch.bfloat16), (64, 128, 256)):
        for window in (0, 100):
            _check_attention(kind, [(200, 3000), (1, 1), (90, 2500)], (8, 2), head_dim, dtype, device, window=window)
            lengths = [(1, 1 + 97 * index) for index in range(40)]
            _check_attention(kind, lengths, (8, 2), head_dim, dtype, device, window=window)


def _check_attention(
    kind: Kind,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    verify: bool = False,
) -> None:
    q, kv_layer, batch = references.attention_case(
        lengths, heads=heads, head_dim=head_dim, block_size=16, dtype=dtype, device=device
    )
    pages, codes = pool_of(kv_layer, kind)
    plain = not softcap and sinks is None
    rows, drafted = references.rows_of(batch) if verify else (batch, None)
    plan = references.plan_of(
        q, rows, num_kv_heads=heads[1], block_size=16, window=window, is_plain=plain, drafted=drafted
    )
    how = attention.Scores(scale=0.2, window=window, softcap=softcap, sinks=sinks)
    out = attention.paged_attention(q.contiguous(), pages, plan, how, codes=codes)
    close(out, references.attention(q, meant(pages, codes), batch, 0.2, window, softcap=softcap, sinks=sinks))


CHECKS = {
    "bytes": check_bytes,
    "writing": check_writing,
    "broken": check_broken,
    "decode": check_decode,
    "queries": check_queries,
    "bfloat16": check_bfloat16,
    "no_numbers": check_no_numbers,
    "prompts": check_prompts,
    "scores": check_scores,
}


def run(name: str, device: str, *, large: bool) -> None:
    """Run one check; its assertions tell."""
    with checking(device):
        CHECKS[name](device)
        if large and name == "decode":
            check_large(device)


def interpret(name: str) -> None:
    """For `interpreter`."""
    run(name, "cpu", large=False)
