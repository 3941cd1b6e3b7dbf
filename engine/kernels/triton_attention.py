"""The attention kernel for what the two fast ones don't do: prompts in float32, GPUs without bulk copies.

Queries of a group are packed in a tile; the context may be split.

T tokens, S sequences, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block size. A program computes M
rows (queries x group) of one (sequence, key head, split): online softmax (Milakov and Gimelshein, 2018) over its part of the
context. With one split it writes the output; with several (split-K, for decoding) it writes a partial sum, its maximum and its
normaliser, and `_combine` adds them up.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention import AttentionBatch

ROWS = 64  # of a prefill tile; half as many in float32, whose tiles would not fit into the registers
KEYS = 64  # positions a loop step; likewise
SPLIT = 512  # positions of one decode split


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, *, scale: float, window: int
) -> torch.Tensor:
    q = q.contiguous()
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.shape[3], kv_layer.shape[2]
    group = num_heads // num_kv_heads
    decoding = batch.max_query_len == 1
    tile = 2 if q.element_size() == 4 else 1
    rows = max(16, triton.next_power_of_2(group)) if decoding else max(ROWS // tile, triton.next_power_of_2(group))
    queries = rows // triton.next_power_of_2(group)
    splits = triton.cdiv(batch.max_context_len, SPLIT) if decoding else 1
    num_sequences = batch.context_len.shape[0]
    out = torch.empty_like(q)
    partial = q.new_empty((splits, q.shape[0], num_heads, head_dim), dtype=torch.float32) if splits > 1 else out
    stats = q.new_empty((splits, q.shape[0], num_heads, 2), dtype=torch.float32) if splits > 1 else out
    grid = (num_sequences, num_kv_heads, triton.cdiv(batch.max_query_len, queries) * splits)
    _attend[grid](
        q, kv_layer, batch.query_start, batch.context_len, batch.block_table, out, partial, stats,
        scale * 1.4426950408889634, window, splits, num_heads, q.shape[0], batch.block_table.stride(0),
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3),
        B=block_size, G=group, G_PADDED=triton.next_power_of_2(group), D=head_dim,
        D_PADDED=max(16, triton.next_power_of_2(head_dim)),
        Q=queries, KEYS=KEYS // tile, SPLIT=SPLIT, HAS_WINDOW=window > 0, SPLITS=splits > 1,
    )  # fmt: skip
    if splits > 1:
        _combine[(q.shape[0], num_heads)](
            partial, stats, out, splits, q.shape[0], num_heads, D=head_dim, D_PADDED=triton.next_power_of_2(head_dim)
        )
    return out


@triton.jit
def _attend(
    q_THD, kv, query_start, context_len, block_table, out_THD, partial, stats,
    scale_log2, window, num_splits, num_heads, num_tokens, table_row, kv_block, kv_plane, kv_slot, kv_head,
    B: tl.constexpr, G: tl.constexpr, G_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    Q: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    sequence, kv_at = tl.program_id(0), tl.program_id(1)
    tile, split = tl.program_id(2) // num_splits, tl.program_id(2) % num_splits
    start = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - start
    context = tl.load(context_len + sequence)
    if tile * Q < num_queries:
        row = tl.arange(0, Q * G_PADDED)
        query, member = tile * Q + row // G_PADDED, row % G_PADDED
        d = tl.arange(0, D_PADDED)
        valid = (query < num_queries) & (member < G)
        token = (start + query).to(tl.int64)
        head = kv_at * G + member
        offsets = (token * num_heads + head)[:, None] * D + d[None, :]
        mask = valid[:, None] & (d < D)[None, :]
        q = tl.load(q_THD + offsets, mask=mask, other=0.0)
        position = context - num_queries + query  # of each row's token

        first, last = 0, tl.minimum(context, context - num_queries + (tile + 1) * Q)
        if HAS_WINDOW:
            first = tl.maximum(0, context - num_queries + tile * Q - window + 1) // KEYS * KEYS
        if SPLITS:
            first, last = tl.maximum(first, split * SPLIT), tl.minimum(last, (split + 1) * SPLIT)

        top = tl.full((Q * G_PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((Q * G_PADDED,), tl.float32)
        sums = tl.zeros((Q * G_PADDED, D_PADDED), tl.float32)
        for key_start in range(first, last, KEYS):
            at = key_start + tl.arange(0, KEYS)
            known = at < last
            block = tl.load(block_table + sequence * table_row + at // B, mask=known, other=0).to(tl.int64)
            place = block * kv_block + (at % B) * kv_slot + kv_at * kv_head
            where = place[:, None] + d[None, :]
            inside = known[:, None] & (d < D)[None, :]
            keys = tl.load(kv + where, mask=inside, other=0.0)
            values = tl.load(kv + kv_plane + where, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
            seen = known[None, :] & (at[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (at[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - safe_top[:, None])
            decay = tl.exp2(top - safe_top)
            total = total * decay + tl.sum(weights, axis=1)
            sums = sums * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            top = new_top

        if SPLITS:
            base = (split.to(tl.int64) * num_tokens + token) * num_heads + head
            tl.store(partial + base[:, None] * D + d[None, :], sums, mask=mask)
            tl.store(stats + base * 2, top, mask=valid)
            tl.store(stats + base * 2 + 1, total, mask=valid)
        else:
            result = sums / total[:, None]
            tl.store(out_THD + offsets, result.to(out_THD.dtype.element_ty), mask=mask)


@triton.jit
def _combine(partial, stats, out_THD, num_splits, num_tokens, num_heads, D: tl.constexpr, D_PADDED: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D_PADDED)
    top, total = float("-inf"), 0.0
    sums = tl.zeros((D_PADDED,), tl.float32)
    for split in range(num_splits):
        base = (split * num_tokens + token) * num_heads + head
        split_top, split_total = tl.load(stats + base * 2), tl.load(stats + base * 2 + 1)
        new_top = tl.maximum(top, split_top)
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        old, new = tl.exp2(top - safe_top), tl.exp2(split_top - safe_top)
        sums = sums * old + tl.load(partial + base * D + d, mask=d < D, other=0.0) * new
        total = total * old + split_total * new
        top = new_top
    out = out_THD + (token * num_heads + head) * D + d
    tl.store(out, (sums / total).to(out_THD.dtype.element_ty), mask=d < D)
