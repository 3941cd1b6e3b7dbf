"""Absorbed MLA decoding: DeepSeek's latents, the heads of a rank of eight and all 128."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.ops.attention import BLOCK, decode_plan, pages_of, workspace
from benchmarks.kernels.ops.comparing import OURS, PLAIN, Comparison, Implementation, Run
from benchmarks.kernels.ops.libraries import library
from engine.kernels.mla import mla_attention, opened

LATENTS, ROTATED = 512, 64
COMPARED_ROWS = 8
FLASH_MLA_BLOCK = 64


def decode(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> Iterator[Comparison]:
    """One new token a sequence."""
    shapes = (
        ((2, 40, 4),) if is_tiny else ((1, 1072, 16), (32, 1072, 16), (64, 1072, 16), (32, 8256, 16), (64, 1072, 128))
    )
    for count, context, num_heads in shapes:
        yield _decode(device, dtype, (count, context, num_heads), (64, 16) if is_tiny else (LATENTS, ROTATED))


def _decode(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], sizes: tuple[int, int]
) -> Comparison:
    (count, context, num_heads), (rank, rotated) = shape, sizes
    width, size = -(-context // BLOCK), rank + rotated
    both = torch.randn(count * width, 1, BLOCK, 1, size, device=device).to(dtype)
    kept = opened([both], rank, None, dtype)
    table = torch.randperm(count * width, device=device).int().view(count, width)
    q = torch.randn(count, num_heads, size, device=device).to(dtype)
    plan, scale = decode_plan(table, context, 1), float(size**-0.5)
    compared = slice(min(count, COMPARED_ROWS))

    def exact() -> torch.Tensor:
        rows = both[table[compared].long()].flatten(1, -2)[:, :context].double()
        return (q[compared].double() @ rows.transpose(1, 2) * scale).softmax(dim=-1) @ rows[..., :rank]

    return Comparison(
        op="mla-decode",
        shape=f"b{count} ctx{context} heads {num_heads}",
        implementations={
            OURS: Implementation(prepare=lambda: lambda: mla_attention(q, kept, plan, rank=rank, scale=scale)),
            PLAIN: Implementation(
                prepare=lambda: lambda: mla_attention.reference(q, kept, plan, rank=rank, scale=scale), in_graph=False
            ),
            "FlashMLA": Implementation(
                prepare=lambda: _flash_mla(q, both, table, context, rank, scale), output=lambda out: out[:, 0]
            ),
            **{
                f"FlashInfer MLA {version}": Implementation(
                    prepare=lambda version=version: _flashinfer(q, both, table, context, rank, scale, version)  # type: ignore[misc]
                )
                for version in ("fa2", "fa3")
            },
        },
        exact=exact,
        compared=lambda out: out[compared],
        num_bytes=2.0 * count * context * size + q.nbytes + 2.0 * count * num_heads * rank,
        flops=2.0 * count * context * num_heads * (size + rank),
    )


def _flashinfer(
    q: torch.Tensor, both: torch.Tensor, table: torch.Tensor, context: int, rank: int, scale: float, version: str
) -> Run:
    wrapper = library("flashinfer").mla.BatchMLAPagedAttentionWrapper(workspace(q.device), backend=version)
    count, rows = len(q), both[:, 0, :, 0]
    starts, pages, _ = pages_of(table, context)
    lengths = torch.full((count,), context, dtype=torch.int32, device=q.device)
    wrapper.plan(
        torch.arange(count + 1, dtype=torch.int32, device=q.device), starts, pages, lengths,
        q.shape[1], rank, q.shape[2] - rank, BLOCK, False, scale, q.dtype, q.dtype,
    )  # fmt: skip
    queries, rotated = q[..., :rank].contiguous(), q[..., rank:].contiguous()
    latents, keys = rows[..., :rank].contiguous(), rows[..., rank:].contiguous()
    out = torch.empty_like(queries)
    run: Run = lambda: wrapper.run(queries, rotated, latents, keys, out=out)  # noqa: E731
    return run


def _flash_mla(q: torch.Tensor, both: torch.Tensor, table: torch.Tensor, context: int, rank: int, scale: float) -> Run:
    flash = library("flash_mla")
    count = len(q)
    per_page = FLASH_MLA_BLOCK // BLOCK
    width = -(-table.shape[1] // per_page)
    rows = torch.zeros(count, width * FLASH_MLA_BLOCK, q.shape[2], dtype=q.dtype, device=q.device)
    rows[:, : table.shape[1] * BLOCK] = both[table.long()].view(count, -1, q.shape[2])
    pages = rows.view(count * width, FLASH_MLA_BLOCK, 1, q.shape[2])
    index = torch.arange(count * width, dtype=torch.int32, device=q.device).view(count, width)
    lengths = torch.full((count,), context, dtype=torch.int32, device=q.device)
    metadata, splits = flash.get_mla_metadata(lengths, q.shape[1], 1)

    def run() -> torch.Tensor:
        out: torch.Tensor = flash.flash_mla_with_kvcache(
            q[:, None], pages, index, lengths, rank, metadata, splits, softmax_scale=scale, causal=True
        )[0]
        return out

    return run
