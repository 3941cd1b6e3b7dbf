"""The choice of a pass's attention kernel: by tensors, device, and sliding window."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from engine.kernels.attention import on_cpu
from engine.kernels.attention.hopper_trial import hopper_works, tiles_at_once
from engine.kernels.attention.plan import AttentionPlan, HeadShape, PrefillPlan, Scores
from engine.kernels.attention.split import LARGE_TILE, SMALL_TILE, Tiling
from engine.kernels.codes import Codes, head_dim
from engine.kernels.device import describe, use_triton
from engine.kernels.once import Once


def tiling(device: torch.device, dtype: torch.dtype, heads: HeadShape, *, is_plain: bool) -> Tiling:
    """The tiling of the kernel for prompts of this shape here; `is_plain`: no window, soft-cap or sinks."""
    if heads.head_dim > 128:
        return Tiling(LARGE_TILE, LARGE_TILE)
    if is_plain and hopper_works(device, dtype, heads.num_heads, heads.num_kv_heads, heads.head_dim):
        return Tiling(SMALL_TILE, LARGE_TILE, tiles_at_once(device, heads.num_heads))
    return Tiling(SMALL_TILE, LARGE_TILE)


def needs_qkv(plan: AttentionPlan, heads: torch.Tensor, codes: Codes | None = None) -> bool:
    """True if the prefill kernel reads new keys and values directly from the projection.

    `heads` [..., D]: queries, or what a layer keeps.
    """
    dtype = heads.dtype if codes is None else codes.dtype
    new_only = plan.prefill is not None and plan.prefill.blocks is None
    return new_only and _copies_in_bulk(heads, dtype, head_dim(heads, codes))


def copies_in_bulk(q: torch.Tensor) -> bool:
    """True if the TMA kernel applies: 16-bit dtypes on Hopper or later (or in the interpreter)."""
    return _copies_in_bulk(q, q.dtype, q.shape[-1])


def _copies_in_bulk(heads: torch.Tensor, dtype: torch.dtype, dim: int) -> bool:
    has_tma = not heads.is_cuda or describe(heads.device).has_tma
    return use_triton(heads) and dtype.itemsize == 2 and dim <= 256 and has_tma


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    how: Scores,
    *,
    qkv: torch.Tensor | None = None,
    codes: Codes | None = None,
    once: Once | None = None,
) -> torch.Tensor:
    """Return [T, Hq, D]: the i-th new token of a sequence attends to all positions up to its own.

    `q` [T, Hq, D]; `kv_layer` [num_blocks, 2, B, Hkv, D] is a strided view of the pool with the new tokens' KV.
    Sums are in float32. `qkv` [T, (Hq + 2 Hkv) D] as `rope_and_write_kv` left it in place, if `needs_qkv`. `codes`: what the
    pool's codes mean; None: it holds the numbers themselves. `once`: of the pass.
    """
    if use_triton(q):
        out = torch.empty_like(q)
        both = plan.num_decode > 0 and plan.prefill is not None
        with _beside_each_other(q.device) if both and _is_captured(q) else nullcontext() as second:
            if plan.num_decode:
                _decode(q, kv_layer, plan, out, how, codes)
            if plan.prefill is not None:
                rows = slice(plan.num_decode, None)
                new = None if qkv is None else qkv[rows]
                with torch.cuda.stream(second):
                    _prefill(q[rows], new, kv_layer, plan.prefill, out[rows], how, codes)
        return out
    decoding, prompts = plan.num_decode, None if plan.prefill is None else plan.prefill.batch
    if prompts is None:
        assert plan.decode is not None
        return on_cpu.attend(q, kv_layer, plan.decode, how, codes, once)
    found = on_cpu.attend(q[decoding:], kv_layer, prompts, how, codes)
    if plan.decode is None:
        return found
    return torch.cat((on_cpu.attend(q[:decoding], kv_layer, plan.decode, how, codes, once), found))


def _is_captured(q: torch.Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def _beside_each_other(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A second stream for concurrent work within the block; later work waits for both.

    Decoding waits for memory, prompts for the tensor cores, and neither fills a GPU alone. Launch decoding first: behind a
    prompt's programs, one of which fills a processor, its many small ones would wait for a second round.
    """
    first, second = torch.cuda.current_stream(device), _second_stream(device)
    second.wait_stream(first)
    yield second
    first.wait_stream(second)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    how: Scores,
    codes: Codes | None,
) -> None:
    from engine.kernels.attention import triton_decode

    items = plan.items[how.window]
    triton_decode.paged_decode(q, kv_layer, items, plan.tables, out, how, codes)


def _prefill(
    q: torch.Tensor,
    qkv: torch.Tensor | None,
    kv_layer: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    how: Scores,
    codes: Codes | None,
) -> None:
    if not copies_in_bulk(q):
        from engine.kernels.attention import triton_paged_prefill

        triton_paged_prefill.paged_prefill(
            q, kv_layer, plan.batch.block_table, plan.tiles, out, how, codes, rows=plan.rows
        )
        return
    from engine.kernels.attention import triton_prefill

    num_kv_heads = kv_layer.shape[3]
    is_plain = not how.window and how.are_plain
    if is_plain and plan.rows == LARGE_TILE and hopper_works(q.device, q.dtype, q.shape[1], num_kv_heads, q.shape[2]):
        from engine.kernels.attention import triton_prefill_hopper

        in_pool = codes is None and plan.blocks is not None and triton_prefill_hopper.reads_pages(kv_layer.shape[2])
        if in_pool:
            keys, values = kv_layer[:, 0].flatten(2), kv_layer[:, 1].flatten(2)
        else:
            keys, values = _in_a_row(qkv, kv_layer, plan, codes)
        triton_prefill_hopper.prefill(
            q, keys, values, plan.tiles, out, num_kv_heads=num_kv_heads, scale=how.scale, at_once=plan.at_once,
            blocks=plan.blocks if in_pool else None,
        )  # fmt: skip
        return
    keys, values = _in_a_row(qkv, kv_layer, plan, codes)
    triton_prefill.prefill(
        q, keys, values, plan.tiles, out, how,
        rows=plan.rows, num_kv_heads=num_kv_heads, max_context_len=plan.batch.max_context_len,
    )  # fmt: skip


def _in_a_row(
    qkv: torch.Tensor | None, kv_layer: torch.Tensor, plan: PrefillPlan, codes: Codes | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contexts' keys and values [C, Hkv D], contiguous: the projection's own, or copied (dequantised) from the pool."""
    from engine.kernels.attention import triton_prefill

    if plan.blocks is not None:
        return triton_prefill.gather_context(kv_layer, plan.blocks, codes)
    assert qkv is not None, "needs_qkv"
    width = kv_layer.shape[3] * head_dim(kv_layer, codes)
    return qkv[:, -2 * width : -width], qkv[:, -width:]
