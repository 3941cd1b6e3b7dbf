"""Checks of the kernels of attention over latents against float64.

`test_triton.py` runs them in Triton's interpreter, `tests/gpu/test_kernels.py` on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from engine.kernels.attention.split import LARGE_TILE, SMALL_TILE, Tiling
from engine.kernels.codes import KINDS, LATENT_KINDS, Kind, decoded, encoded
from engine.kernels.mla import (
    Forms,
    Latents,
    MLAShape,
    mla_attention,
    opened,
    rotate_queries,
    up_projected_attention,
    write_latents,
)
from tests.unit.kernels import references
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import Suite


def kept_of(both: torch.Tensor, rank: int, kind: Kind | None) -> Latents:
    """`both` [num_blocks, 1, B, 1, C + R] as a layer keeps it: views of a pool of two layers, each block one run of bytes."""
    if kind is None:
        return opened([both], rank, None, both.dtype)
    shape, device = both.shape[:-1], both.device
    dtypes = [getattr(torch, KINDS[kind][0]), both.dtype, torch.float32][: 2 + (kind == "int8")]
    dims = [rank, both.shape[-1] - rank, 1]
    sizes = [2 * shape[1:].numel() * dim * dtype.itemsize for dim, dtype in zip(dims, dtypes, strict=False)]
    blocks = torch.full((shape[0], sum(sizes)), 0xFF, dtype=torch.uint8, device=device)
    parts = [
        part.view(dtype).unflatten(1, (2, *shape[1:], -1))[:, 1]
        for part, dtype in zip(blocks.split(sizes, dim=1), dtypes, strict=True)
    ]
    factors = torch.tensor([0.03 if kind == "fp8" else 1.0, 7.0], device=device)
    kept = opened(parts, rank, factors, both.dtype)
    assert kept.codes is not None
    codes, scales = encoded(both[..., :rank], 0, kept.codes)
    kept.latents.copy_(codes)
    kept.rotated.copy_(both[..., rank:])
    if kept.codes.scales is not None and scales is not None:
        kept.codes.scales.copy_(scales)
    return kept


def meant(kept: Latents) -> torch.Tensor:
    """The latents that a pool stands for."""
    if kept.codes is None:
        return kept.latents
    return decoded(kept.latents, kept.codes.scales, kept.codes.factors[0], torch.float64)


def check_prompts(device: str, large: bool) -> None:
    for heads, rank, size in [(4, 32, 16), (3, 40, 8), (20, 16, 16)]:
        for dtype in (torch.float32, torch.float16):
            _check_attention([(9, 9), (70, 85), (1, 30), (3, 140)], heads, rank, size, 16, dtype, device)
    if large:
        for heads in (16, 128):
            lengths = [(200, 3000), (1, 1), (700, 700), (90, 2500)]
            _check_attention(lengths, heads, 512, 64, 16, torch.bfloat16, device)


def check_decode(device: str, large: bool) -> None:
    for heads, rank, size in [(4, 32, 16), (3, 40, 8), (80, 16, 16)]:
        for dtype in (torch.float32, torch.float16):
            _check_attention([(1, 1), (1, 70), (1, 530)], heads, rank, size, 16, dtype, device)
    if large:
        for heads in (16, 128):
            lengths = [(1, 1 + 97 * index) for index in range(40)]
            _check_attention(lengths, heads, 512, 64, 16, torch.bfloat16, device)


def check_codes(device: str, large: bool) -> None:
    """Of prompts, decoding, and both."""
    for kind, dtype in itertools.product(LATENT_KINDS, (torch.float32, torch.float16)):
        for lengths in ([(9, 9), (70, 85)], [(1, 1), (1, 70), (1, 530)], [(1, 40), (1, 3), (5, 20)]):
            _check_attention(lengths, 4, 32, 16, 16, dtype, device, kind)
        _check_attention([(3, 30), (1, 9)], 3, 40, 8, 16, dtype, device, kind)
        if large and dtype == torch.float16:
            for heads in (16, 128):
                _check_attention([(200, 3000), (1, 1), (90, 2500)], heads, 512, 64, 16, torch.bfloat16, device, kind)
                lengths = [(1, 1 + 97 * index) for index in range(40)]
                _check_attention(lengths, heads, 512, 64, 16, torch.bfloat16, device, kind)


def _check_attention(
    lengths: list[tuple[int, int]],
    heads: int,
    rank: int,
    size: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    kind: Kind | None = None,
) -> None:
    q, both, batch = references.attention_case(
        lengths, heads=(heads, 1), head_dim=rank + size, block_size=block_size, dtype=dtype, device=device
    )
    kept, scale = kept_of(both[:, :1], rank, kind), (rank + size) ** -0.5
    plan = references.plan_of(q, batch, num_kv_heads=1, block_size=block_size, window=0)
    latents = torch.cat((meant(kept).double(), kept.rotated.double()), dim=-1)
    expected = references.attention(q, latents.expand(-1, 2, -1, -1, -1), batch, scale, 0)[..., :rank]
    for compute in (mla_attention, mla_attention.reference):
        close(compute(q.contiguous(), kept, plan, rank=rank, scale=scale), expected)


def check_made(device: str, large: bool) -> None:
    """Keys and values are made, of contexts in one piece and in several."""
    lengths = [(9, 9), (70, 85), (1, 30), (3, 70)]
    for room in (10_000, 1 << 30):  # of one piece, or less than all
        for sizes in [(2, 32, 16, 24, 40), (3, 40, 8, 8, 24), (1, 16, 24, 48, 16)]:
            _check_made(lengths, sizes, torch.float16, device, room)
        _check_made(lengths, (2, 32, 16, 24, 40), torch.float32, device, room)
    _check_made([(130, 140)], (1, 16, 16, 16, 16), torch.float16, device, 10_000, cut=(LARGE_TILE, LARGE_TILE))
    for kind in LATENT_KINDS:
        _check_made([(70, 85), (1, 30)], (2, 40, 8, 24, 16), torch.float16, device, 20_000, kind)
    if large:
        lengths = [(200, 3000), (1, 1), (700, 700), (90, 2500)]
        for heads, plain, value in [(16, 128, 128), (20, 192, 256), (128, 128, 128)]:
            for room in (64 << 20, 1 << 30):
                _check_made(lengths, (heads, 512, 64, plain, value), torch.bfloat16, device, room)


def _check_made(
    lengths: list[tuple[int, int]],
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: str,
    room: int,
    kind: Kind | None = None,
    cut: tuple[int, int] = (SMALL_TILE, LARGE_TILE),
) -> None:
    heads, rank, size, plain, value = sizes
    shape = MLAShape(num_heads=heads, rank=rank, plain=plain, rotated=size, value=value, itemsize=dtype.itemsize)
    forms = Forms(shape=shape, per_byte=1, room=room)
    _, both, batch = references.attention_case(
        lengths, heads=(heads, 1), head_dim=rank + size, block_size=16, dtype=dtype, device=device
    )
    kept, scale = kept_of(both[:, :1], rank, kind), (plain + size) ** -0.5
    q = torch.randn(sum(new for new, _ in lengths), heads, plain + size, device=device).to(dtype)
    out_of_latents = (torch.randn(heads * (plain + value), rank, device=device) / rank**0.5).to(dtype)
    prompts = references.prefill_plan(batch, Tiling(*cut), 16)
    latents, keys = meant(kept).double(), kept.rotated.double().expand(-1, -1, -1, heads, -1)
    made = torch.matmul(latents, out_of_latents.double().T)[:, :, :, 0].unflatten(-1, (heads, -1))
    wide = max(plain + size, value)
    pool = torch.zeros((*made.shape[:-1], 2, wide), dtype=torch.float64, device=device).movedim(-2, 1)[:, :, 0]
    pool[:, 0, ..., : plain + size] = torch.cat((made[..., :plain], keys), dim=-1)[:, 0]
    pool[:, 1, ..., :value] = made[:, 0, ..., plain:]
    asked = torch.nn.functional.pad(q, (0, wide - plain - size))
    expected = references.attention(asked, pool, batch, scale, 0)[..., :value]
    for compute in (up_projected_attention, up_projected_attention.reference):
        close(compute(q, kept, prompts, out_of_latents, forms, scale=scale), expected)


def check_writing(device: str, large: bool) -> None:
    for interleaved in (False, True):
        for tokens, heads, rank, size in [(5, 4, 32, 16), (3, 3, 40, 8)] + [(300, 128, 512, 64)] * large:
            _check_writing(device, tokens, heads, rank, size, interleaved)


def _check_writing(device: str, tokens: int, heads: int, rank: int, size: int, interleaved: bool) -> None:
    dtype, block_size = torch.float16, 4
    product = torch.randn(tokens, 7 + rank + size, device=device).to(dtype)[:, 7:]  # beside other features
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    angles = torch.rand(50, size // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens].int()
    slots[tokens // 2] = -1  # not to be written
    pool = torch.full((num_blocks, 3, 1, block_size, 1, rank + size), 7.0, device=device).to(dtype)
    norm = torch.randn(rank, device=device).to(dtype)
    kept = kept_of(pool[:, 1], rank, None)
    write_latents(product, positions, cos_sin, slots, kept, norm=norm, eps=1e-6, interleaved=interleaved)
    wanted, slots = slots >= 0, slots[slots >= 0].long()
    row = pool[slots // block_size, 1, 0, slots % block_size, 0]
    close(row[:, :rank], references.rms_norm(product[:, :rank], norm, 1e-6)[wanted])
    keys = as_halves(product[:, None, rank:], interleaved)
    close(row[:, rank:], references.rotated(keys, positions, cos_sin)[wanted, 0])
    pool[slots // block_size, 1, 0, slots % block_size, 0] = 7.0
    assert bool((pool == 7.0).all()), "something was written elsewhere"

    q = torch.randn(tokens, heads, 5 + size, device=device).to(dtype)
    out = torch.full((tokens, heads, rank + size), 7.0, device=device).to(dtype)
    rotate_queries(q, positions, cos_sin, out, interleaved=interleaved)
    close(out[..., rank:], references.rotated(as_halves(q[..., 5:], interleaved), positions, cos_sin))
    assert bool((out[..., :rank] == 7.0).all())


def check_writing_codes(device: str, large: bool) -> None:
    """The kernel writes what the twin writes, and nothing beside it."""
    for kind, interleaved, dtype in itertools.product(LATENT_KINDS, (False, True), (torch.float32, torch.float16)):
        for tokens, rank, size in [(5, 32, 16), (40, 40, 8)] + [(300, 512, 64)] * large:
            _check_writing_codes(device, kind, interleaved, dtype, tokens, rank, size)


def _check_writing_codes(
    device: str, kind: Kind, interleaved: bool, dtype: torch.dtype, tokens: int, rank: int, size: int
) -> None:
    product = torch.randn(tokens, rank + size, device=device).to(dtype)
    product[0] = 0
    norm = (30 * torch.randn(rank, device=device)).to(dtype)  # with a factor of 0.03, beyond fp8's range, too
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    angles = torch.rand(50, size // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm(tokens + 8, device=device)[:tokens].int()
    slots[tokens // 2] = -1
    found = []
    for compute in (write_latents, write_latents.reference):
        nothing = torch.full((-(-tokens // 4) + 2, 1, 4, 1, rank + size), 7.0, device=device, dtype=dtype)
        kept = kept_of(nothing, rank, kind)
        compute(product, positions, cos_sin, slots, kept, norm=norm, eps=1e-6, interleaved=interleaved)
        found.append((meant(kept), kept.rotated))
    (ours, our_keys), (theirs, their_keys) = found
    close(our_keys, their_keys.double())
    # A quotient that is rounded otherwise may be the next code, once in a while.
    same = ours.isclose(theirs, rtol=2e-3, atol=1e-6)
    assert same.double().mean() > 0.995, (kind, dtype, int((~same).sum()))
    torch.testing.assert_close(ours, theirs, rtol=0.13, atol=1.0)
    assert bool((ours == meant(kept_of(torch.full_like(nothing, 7.0), rank, kind))).any()), "all places were written"


def as_halves(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The same pairs with half of the features between both."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) if interleaved else x


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "prompts": check_prompts,
    "decode": check_decode,
    "codes": check_codes,
    "made": check_made,
    "writing": check_writing,
    "writing_codes": check_writing_codes,
}

SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
