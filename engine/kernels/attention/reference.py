"""Paged attention in plain torch: what the CPU computes, and the kernels' reference in tests.

S sequences, C positions of a context, Q new tokens, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block
size.
"""

from __future__ import annotations

import torch

from engine.kernels.attention.plan import AttentionBatch


def attend(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, *, scale: float, window: int
) -> torch.Tensor:
    """Sequence by sequence; a decode batch is padded and computed at once."""
    if batch.max_query_len == 1 and len(batch.context_len) > 1:
        return _attend_singles(q, kv_layer, batch, scale, window)
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()
    out = torch.empty_like(q)
    for index, context in enumerate(lengths):
        rows = slice(starts[index], starts[index + 1])
        out[rows] = attend_one(q[rows], kv_layer, batch.block_table[index], context, scale, window)
    return out


def attend_one(
    q: torch.Tensor, kv_layer: torch.Tensor, table: torch.Tensor, context: int, scale: float, window: int
) -> torch.Tensor:
    """`q` [Q, Hq, D] of one sequence with `context` positions -> [Q, Hq, D]."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    first = max(0, context - len(q) - window + 1) // block_size if window else 0
    blocks = table[first : -(-context // block_size)].long()
    keys, values = kv_layer[blocks].unbind(1)  # [blocks, B, Hkv, D]
    first_position = first * block_size
    keys, values = (x.flatten(0, 1)[: context - first_position].float() for x in (keys, values))  # [C, Hkv, D]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [Q, Hkv, G, D]
    scores = torch.einsum("qhgd,chd->hgqc", grouped, keys) * scale
    query_at = torch.arange(context - len(q), context, device=q.device)[:, None]
    key_at = torch.arange(first_position, context, device=q.device)
    hidden = key_at > query_at
    if window:
        hidden = hidden | (key_at <= query_at - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqc,chd->qhgd", weights, values).flatten(1, 2).to(q.dtype)


def _attend_singles(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, scale: float, window: int
) -> torch.Tensor:
    """One new token each: `q` [S, Hq, D], contexts padded to the longest."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    count = -(-batch.max_context_len // block_size)
    keys, values = kv_layer[batch.block_table[:, :count].long()].unbind(2)  # [S, blocks, B, Hkv, D]
    keys, values = (x.flatten(1, 2).float() for x in (keys, values))  # [S, C, Hkv, D]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [S, Hkv, G, D]
    scores = torch.einsum("shgd,schd->shgc", grouped, keys) * scale
    at = torch.arange(keys.shape[1], device=q.device)
    lengths = batch.context_len.long()[:, None]
    hidden = at >= lengths
    if window:
        hidden = hidden | (at < lengths - window)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
    values = values.masked_fill((at >= lengths)[:, :, None, None], 0.0)  # other rows may hold NaN: 0 * NaN is NaN
    return torch.einsum("shgc,schd->shgd", weights, values).flatten(1, 2).to(q.dtype)
