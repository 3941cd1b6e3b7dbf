"""Attention of new tokens to everything before them in a paged pool: variable lengths, chunks, grouped queries, a window.

T tokens of S sequences one behind the other, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.backend import use_triton


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each sequence's tokens are, on the device."""

    query_start: torch.Tensor  # [S + 1] int32: rows [query_start[s], query_start[s + 1]) are sequence s's
    context_len: torch.Tensor  # [S] int32: positions in the pool, the new tokens included
    block_table: torch.Tensor  # [S, most blocks] int32
    max_query_len: int
    max_context_len: int


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, *, scale: float, window: int
) -> torch.Tensor:
    """Return [T, Hq, D]: the i-th new token of a sequence attends to all positions up to its own.

    `kv_layer` [num_blocks, 2, B, Hkv, D] is a strided view of the pool that holds the new tokens' KV already. `window` > 0: only
    the last `window` positions, its own included. Sums are in float32.
    """
    if use_triton(q):
        from engine.kernels.triton_attention import paged_attention as kernel

        return kernel(q, kv_layer, batch, scale=scale, window=window)
    return reference(q, kv_layer, batch, scale=scale, window=window)


def reference(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, *, scale: float, window: int
) -> torch.Tensor:
    """The twin: sequence by sequence; a batch that only decodes is computed padded, in one go."""
    if batch.max_query_len == 1 and len(batch.context_len) > 1:
        return _decode(q, kv_layer, batch, scale, window)
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()
    out = torch.empty_like(q)
    for index, context in enumerate(lengths):
        rows = slice(starts[index], starts[index + 1])
        out[rows] = _one_sequence(q[rows], kv_layer, batch.block_table[index], context, scale, window)
    return out


def _one_sequence(
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


def _decode(q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, scale: float, window: int) -> torch.Tensor:
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
    values = values.masked_fill((at >= lengths)[:, :, None, None], 0.0)  # rows of others may hold NaN: 0 * NaN is NaN
    return torch.einsum("shgc,schd->shgd", weights, values).flatten(1, 2).to(q.dtype)
