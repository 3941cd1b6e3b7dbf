"""Paged attention in plain torch: what the CPU computes, and the kernels' reference in tests.

S sequences, C positions of a context, Q new tokens, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block
size.
"""

from __future__ import annotations

import torch

from engine.kernels.attention.plan import AttentionBatch, Scores, first_seen
from engine.kernels.codes import Codes, numbers_of


def attend(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, how: Scores, codes: Codes | None = None
) -> torch.Tensor:
    """Sequence by sequence; a decode batch is padded and computed at once."""
    if batch.max_query_len == 1 and len(batch.context_len) > 1:
        return _attend_singles(q, kv_layer, batch, how, codes)
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()
    out = torch.empty_like(q)
    for index, context in enumerate(lengths):
        rows = slice(starts[index], starts[index + 1])
        out[rows] = attend_one(q[rows], kv_layer, batch.block_table[index], context, how, codes)
    return out


def attend_one(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    table: torch.Tensor,
    context: int,
    how: Scores,
    codes: Codes | None = None,
) -> torch.Tensor:
    """`q` [Q, Hq, D] of one sequence with `context` positions -> [Q, Hq, D]."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    window = how.window
    first = max(0, first_seen(context - len(q), window)) // block_size
    blocks = table[first : -(-context // block_size)].long()
    keys, values = numbers_of(kv_layer, blocks, codes).unbind(1)  # [blocks, B, Hkv, D]
    first_position = first * block_size
    keys, values = (x.flatten(0, 1)[: context - first_position].float() for x in (keys, values))  # [C, Hkv, D]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [Q, Hkv, G, D]
    scores = _capped(torch.einsum("qhgd,chd->hgqc", grouped, keys) * how.scale, how.softcap)
    query_at = torch.arange(context - len(q), context, device=q.device)[:, None]
    key_at = torch.arange(first_position, context, device=q.device)
    hidden = (key_at > query_at) | (key_at < first_seen(query_at, window))
    weights = _softmax(scores.masked_fill(hidden, float("-inf")), how.sinks)
    return torch.einsum("hgqc,chd->qhgd", weights, values).flatten(1, 2).to(q.dtype)


def _attend_singles(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, how: Scores, codes: Codes | None
) -> torch.Tensor:
    """Attention of one new token each: `q` [S, Hq, D], contexts padded to the longest."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    lengths = batch.context_len.long()[:, None]
    begins = first_seen(lengths - 1, how.window).clamp(min=0)
    first = begins // block_size
    count = int((-(-lengths // block_size) - first).max())
    at = (first + torch.arange(count, device=q.device)).clamp(max=batch.block_table.shape[1] - 1)
    # Block-table entries past the context are undefined.
    blocks = batch.block_table.long().gather(1, at).clamp(min=0)
    keys, values = numbers_of(kv_layer, blocks, codes).unbind(2)  # [S, blocks, B, Hkv, D]
    keys, values = (x.flatten(1, 2).float() for x in (keys, values))  # [S, C, Hkv, D]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [S, Hkv, G, D]
    scores = _capped(torch.einsum("shgd,schd->shgc", grouped, keys) * how.scale, how.softcap)
    positions = first * block_size + torch.arange(keys.shape[1], device=q.device)
    hidden = (positions >= lengths) | (positions < begins)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    weights = _softmax(scores[..., None, :], how.sinks)[..., 0, :]
    values = values.masked_fill(hidden[:, :, None, None], 0.0)  # other rows may hold NaN: 0 * NaN is NaN
    return torch.einsum("shgc,schd->shgd", weights, values).flatten(1, 2).to(q.dtype)


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of `scores` [..., Hkv, G, Q, C]; a sink takes a share without a value."""
    if sinks is None:
        return scores.softmax(dim=-1)
    more = sinks.float().view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, more), dim=-1).softmax(dim=-1)[..., :-1]
