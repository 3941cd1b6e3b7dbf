"""Attention of Llama-3.1-8B's shape over a paged KV cache: ours, torch's over contiguous KV, and libraries'."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.ops.comparing import OURS, PLAIN, Comparison, Implementation, Run
from benchmarks.kernels.ops.libraries import library
from engine.kernels import attention
from engine.kernels.attention import HeadShape
from engine.kernels.attention.reference import attend
from engine.kernels.codes import coded, numbers_of
from engine.kernels.device import describe

BLOCK = 16
WORKSPACE_BYTES = 256 << 20
COMPARED_ROWS = 16
MOST_PLAIN = 2048  # plain attention keeps all scores


LLAMA, TINY = HeadShape(32, 8, 128), HeadShape(4, 2, 16)


def scale_of(heads: HeadShape) -> float:
    return float(heads.head_dim**-0.5)


def decode(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> Iterator[Comparison]:
    """One new token a sequence, context 1,072."""
    counts, context, heads = ((1, 3), 40, TINY) if is_tiny else ((1, 32, 64, 256), 1072, LLAMA)
    for kind in ("16 bits", "fp8"):
        for count in counts:
            yield _decode(device, dtype, heads, count, context, kind)


def _decode(
    device: torch.device, dtype: torch.dtype, heads: HeadShape, count: int, context: int, kind: str
) -> Comparison:
    width = -(-context // BLOCK)
    drawn = torch.randn(count * width, 2, BLOCK, heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    pool, codes = coded(drawn, "fp8") if kind == "fp8" else (drawn, None)
    table = torch.randperm(count * width, device=device).int().view(count, width)
    q = torch.randn(count, heads.num_heads, heads.head_dim, device=device).to(dtype)
    plan = decode_plan(table, context, heads.num_kv_heads)
    batch = _batch(table, 1, context)
    scores = attention.Scores(scale=scale_of(heads))

    def contiguous() -> tuple[torch.Tensor, torch.Tensor]:
        both = numbers_of(pool, table.long(), codes).transpose(1, 2).flatten(2, 3)[:, :, :context]
        keys, values = both.transpose(2, 3).unbind(1)
        return keys.contiguous(), values.contiguous()

    compared = min(count, COMPARED_ROWS)

    def exact() -> torch.Tensor:
        kept = numbers_of(pool, table[:compared].long(), codes).transpose(1, 2).flatten(2, 3)[:, :, :context]
        keys, values = kept.double().unbind(1)  # [S, C, Hkv, D]
        grouped = q[:compared].double().unflatten(1, (heads.num_kv_heads, -1))
        weights = (torch.einsum("shgd,schd->shgc", grouped, keys) * scale_of(heads)).softmax(dim=-1)
        return torch.einsum("shgc,schd->shgd", weights, values).flatten(1, 2)

    found = {
        OURS: Implementation(prepare=lambda: lambda: attention.paged_attention(q, pool, plan, scores, codes=codes)),
        PLAIN: Implementation(prepare=lambda: lambda: attend(q, pool, batch, scores, codes), in_graph=False),
    }
    if codes is None:
        for name, backend in _BACKENDS.items():
            found[name] = Implementation(
                # A group's heads are the rows of one head: GQA without copies.
                prepare=_sdpa(q.unflatten(1, (heads.num_kv_heads, -1)), contiguous, backend, is_causal=False),
                output=lambda out: out.flatten(1, 2),
            )
    found["FlashInfer decode"] = Implementation(prepare=lambda: _flashinfer_decode(q, pool, table, context, heads))
    if codes is None:
        found["FlashAttention-3 paged"] = Implementation(
            prepare=lambda: _flash3_decode(q, pool, table, context, heads), output=lambda out: out[:, 0]
        )
    return Comparison(
        op="attention-decode",
        shape=f"b{count} ctx{context} {'KV fp8' if codes is not None else 'KV 16 bits'}",
        implementations=found,
        exact=exact,
        compared=lambda out: out[:compared],
        num_bytes=2.0 * count * context * heads.num_kv_heads * heads.head_dim * pool.element_size() + 2 * q.nbytes,
        flops=4.0 * count * context * heads.num_heads * heads.head_dim,
    )


def prefill(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> Iterator[Comparison]:
    """A whole prompt at once."""
    for count in (32,) if is_tiny else (2048, 8192):
        yield _prefill(device, dtype, TINY if is_tiny else LLAMA, count)


def _prefill(device: torch.device, dtype: torch.dtype, heads: HeadShape, count: int) -> Comparison:
    sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    qkv = torch.randn(count, sum(sizes) * heads.head_dim, device=device).to(dtype)
    q, keys, values = (part.contiguous() for part in qkv.unflatten(1, (-1, heads.head_dim)).split(sizes, dim=1))
    table = torch.randperm(count // BLOCK, device=device).int()[None]
    pool = torch.empty(count // BLOCK, 2, BLOCK, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device)
    pool[table[0].long()] = torch.stack((keys, values), dim=1).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    cut = attention.tiling(device, dtype, heads, is_plain=True)
    rows, start = cut.rows(count, behind=False), np.zeros(1, dtype=np.int64)
    tiles = torch.from_numpy(cut.deal_out(np.array([count]), np.array([count]), start, rows=rows)).to(device)
    batch, scores = _batch(table, count, count), attention.Scores(scale=scale_of(heads))
    prompts = attention.PrefillPlan(batch, tiles, rows, cut.at_once, None)
    plan = attention.AttentionPlan(0, None, {}, table, prompts)
    chosen = torch.linspace(0, count - 1, COMPARED_ROWS).long().to(device)

    def exact() -> torch.Tensor:
        grouped = q[chosen].double().unflatten(1, (heads.num_kv_heads, -1))
        weights = torch.einsum("qhgd,chd->hgqc", grouped, keys.double()) * scale_of(heads)
        hidden = torch.arange(count, device=device) > chosen[:, None]
        weights = weights.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hgqc,chd->qhgd", weights, values.double()).flatten(1, 2)

    found = {
        OURS: Implementation(prepare=lambda: lambda: attention.paged_attention(q, pool, plan, scores, qkv=qkv)),
    }
    if count <= MOST_PLAIN:
        found[PLAIN] = Implementation(prepare=lambda: lambda: attend(q, pool, batch, scores), in_graph=False)
    for name, backend in _BACKENDS.items():
        found[name] = Implementation(
            prepare=_sdpa(
                q.transpose(0, 1)[None],
                lambda: (keys.transpose(0, 1)[None], values.transpose(0, 1)[None]),
                backend,
                is_causal=True,
            ),
            output=lambda out: out[0].transpose(0, 1),
        )
    for version in ("fa2", "fa3"):
        found[f"FlashInfer paged {version}"] = Implementation(
            prepare=lambda version=version: _flashinfer_prefill(q, pool, table, count, heads, version)  # type: ignore[misc]
        )
    found["FlashAttention-3"] = Implementation(prepare=lambda: _flash3_prefill(q, keys, values, heads))
    return Comparison(
        op="attention-prefill",
        shape=f"{count} tokens",
        implementations=found,
        exact=exact,
        compared=lambda out: out[chosen],
        num_bytes=2.0 * q.nbytes + keys.nbytes + values.nbytes,
        flops=4.0 * heads.num_heads * heads.head_dim * count * (count + 1) / 2,
    )


def decode_plan(table: torch.Tensor, context: int, num_kv_heads: int) -> attention.AttentionPlan:
    """The plan of a pass that decodes sequences of one length."""
    count, width = table.shape
    at_once = attention.items_at_once(describe(table.device), num_kv_heads)
    items, parts = attention.deal_out(np.full(count, context), window=0, at_once=at_once, queries=1)
    attention.point(items, 0, width)
    dealt = attention.DecodeItems(torch.from_numpy(items).to(table.device), torch.from_numpy(parts).to(table.device))
    return attention.AttentionPlan(count, _batch(table, 1, context), {0: dealt}, table, None)


def _batch(table: torch.Tensor, new: int, context: int) -> attention.AttentionBatch:
    count, device = len(table), table.device
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * new
    lengths = torch.full((count,), context, dtype=torch.int32, device=device)
    return attention.AttentionBatch(starts, lengths, table, new, context)


_BACKENDS = {
    "torch SDPA flash, contiguous KV": SDPBackend.FLASH_ATTENTION,
    "torch SDPA cuDNN, contiguous KV": SDPBackend.CUDNN_ATTENTION,
}


def _sdpa(
    q: torch.Tensor,
    contiguous: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    backend: SDPBackend,
    *,
    is_causal: bool,
) -> Callable[[], Run]:
    def prepare() -> Run:
        keys, values = contiguous()

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, keys, values, is_causal=is_causal, enable_gqa=True)

        return run

    return prepare


def pages_of(table: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's index of pages: first entries, entries, positions in each last page."""
    count, width = table.shape
    starts = torch.arange(count + 1, dtype=torch.int32, device=table.device) * width
    last = torch.full((count,), context - (width - 1) * BLOCK, dtype=torch.int32, device=table.device)
    return starts, table.flatten().contiguous(), last


def workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer_decode(q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, context: int, heads: HeadShape) -> Run:
    wrapper = library("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace(q.device), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        *pages_of(table, context), heads.num_heads, heads.num_kv_heads, heads.head_dim, BLOCK,
        q_data_type=q.dtype, kv_data_type=pool.dtype, sm_scale=scale_of(heads),
    )  # fmt: skip
    out = torch.empty_like(q)
    run: Run = lambda: wrapper.run(q, pool, out=out)  # noqa: E731
    return run


def _flashinfer_prefill(
    q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, count: int, heads: HeadShape, version: str
) -> Run:
    wrapper = library("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD", backend=version)
    starts = torch.tensor([0, count], dtype=torch.int32, device=q.device)
    wrapper.plan(
        starts, *pages_of(table, count), heads.num_heads, heads.num_kv_heads, heads.head_dim, BLOCK,
        causal=True, q_data_type=q.dtype, kv_data_type=pool.dtype, sm_scale=scale_of(heads),
    )  # fmt: skip
    out = torch.empty_like(q)
    run: Run = lambda: wrapper.run(q, pool, out=out)  # noqa: E731
    return run


def _flash3_decode(q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, context: int, heads: HeadShape) -> Run:
    flash = library("flash_attn_interface")
    keys, values = pool[:, 0].contiguous(), pool[:, 1].contiguous()
    lengths = torch.full((len(q),), context, dtype=torch.int32, device=q.device)
    run: Run = lambda: flash.flash_attn_with_kvcache(  # noqa: E731
        q[:, None], keys, values, cache_seqlens=lengths, page_table=table, softmax_scale=scale_of(heads)
    )
    return run


def _flash3_prefill(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: HeadShape) -> Run:
    flash = library("flash_attn_interface")

    def run() -> torch.Tensor:
        found = flash.flash_attn_func(q[None], keys[None], values[None], softmax_scale=scale_of(heads), causal=True)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out[0]

    return run
