"""Checks of the kernels of attention over latents against float64.

`test_triton.py` runs them in Triton's interpreter, `tests/gpu/test_kernels.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.latent import latent_attention, rotate_queries, write_latents
from tests.unit.kernels import references
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import checking


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


def _check_attention(
    lengths: list[tuple[int, int]], heads: int, rank: int, size: int, block_size: int, dtype: torch.dtype, device: str
) -> None:
    q, both, batch = references.attention_case(
        lengths, heads=(heads, 1), head_dim=rank + size, block_size=block_size, dtype=dtype, device=device
    )
    latents, scale = both[:, :1], (rank + size) ** -0.5
    plan = references.plan_of(q, batch, num_kv_heads=1, block_size=block_size, window=0)
    expected = references.attention(q, latents.expand(-1, 2, -1, -1, -1), batch, scale, 0)[..., :rank]
    close(latent_attention(q.contiguous(), latents, plan, rank=rank, scale=scale), expected)


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
    write_latents(product, positions, cos_sin, slots, pool[:, 1], norm=norm, eps=1e-6, interleaved=interleaved)
    wanted, slots = slots >= 0, slots[slots >= 0].long()
    row = pool[slots // block_size, 1, 0, slots % block_size, 0]
    close(row[:, :rank], references.rms_norm(product[:, :rank], norm, 1e-6)[wanted])
    keys = _as_halves(product[:, None, rank:], interleaved)
    close(row[:, rank:], references.rotated(keys, positions, cos_sin)[wanted, 0])
    pool[slots // block_size, 1, 0, slots % block_size, 0] = 7.0
    assert bool((pool == 7.0).all()), "something was written elsewhere"

    q = torch.randn(tokens, heads, 5 + size, device=device).to(dtype)
    out = torch.full((tokens, heads, rank + size), 7.0, device=device).to(dtype)
    rotate_queries(q, positions, cos_sin, out, interleaved=interleaved)
    close(out[..., rank:], references.rotated(_as_halves(q[..., 5:], interleaved), positions, cos_sin))
    assert bool((out[..., :rank] == 7.0).all())


def _as_halves(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The same pairs with half of the features between both."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) if interleaved else x


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "prompts": check_prompts,
    "decode": check_decode,
    "writing": check_writing,
}


def run(name: str, device: str, *, large: bool) -> None:
    """Run one check; its assertions tell."""
    with checking(device):
        CHECKS[name](device, large)


def interpret(name: str) -> None:
    """For `interpreter`."""
    run(name, "cpu", large=False)
