"""Paged attention on a CPU, by torch's fused kernel, sequence by sequence: a row never depends on its batch.

Q new tokens, C positions of a context, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block size. What
that kernel doesn't know (soft-caps, sinks) is computed by `reference`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.attention import reference
from engine.kernels.attention.plan import AttentionBatch, Scores, first_seen
from engine.kernels.codes import Codes, numbers_of


def attend(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    how: Scores,
    out: torch.Tensor,
    codes: Codes | None = None,
) -> None:
    """Write the attention of `q` [T, Hq, D] into `out`; see `paged_attention`."""
    if how.softcap or how.sinks is not None:
        out.copy_(reference.attend(q, kv_layer, batch, how, codes))
        return
    if len(batch.context_len) == 1:
        out.copy_(_attend_one(q, kv_layer, batch.block_table[0], batch.max_context_len, how, codes))
        return
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()
    for index, context in enumerate(lengths):
        rows = slice(starts[index], starts[index + 1])
        out[rows] = _attend_one(q[rows], kv_layer, batch.block_table[index], context, how, codes)


def _attend_one(
    q: torch.Tensor, kv_layer: torch.Tensor, table: torch.Tensor, context: int, how: Scores, codes: Codes | None
) -> torch.Tensor:
    """`q` [Q, Hq, D] of one sequence -> [Q, Hq, D]."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    num_new, window = len(q), how.window
    begin = max(0, first_seen(context - num_new, window))
    first = begin // block_size
    begin = begin if num_new == 1 else first * block_size
    table = table[first : -(-context // block_size)]
    read = slice(begin - first * block_size, context - first * block_size)
    keys, values = (  # [1, Hkv, C, D] of [blocks, B, Hkv, D]
        plane.flatten(0, 1)[read].transpose(0, 1).unsqueeze(0) for plane in _planes(kv_layer, table, codes)
    )
    if num_new == 1:  # its heads that share a key are a batch of queries
        grouped = q.view(1, num_kv_heads, -1, q.shape[-1])
        return scaled_dot_product_attention(grouped, keys, values, scale=how.scale).view_as(q)
    heads = q.transpose(0, 1).unsqueeze(0)  # [1, Hq, Q, D]
    keys, values = (x.repeat_interleave(heads.shape[1] // num_kv_heads, dim=1) for x in (keys, values))
    is_whole = context - begin == num_new and not window
    mask = None if is_whole else _seen(num_new, context, begin, window)
    result = scaled_dot_product_attention(heads, keys, values, attn_mask=mask, is_causal=is_whole, scale=how.scale)
    return result[0].transpose(0, 1)


def _planes(kv_layer: torch.Tensor, table: torch.Tensor, codes: Codes | None) -> Iterable[torch.Tensor]:
    """Keys and values of these blocks, each copied once."""
    if codes is None:
        return (kv_layer[:, 0].index_select(0, table), kv_layer[:, 1].index_select(0, table))
    return numbers_of(kv_layer, table, codes).unbind(1)


def _seen(num_new: int, context: int, begin: int, window: int) -> torch.Tensor:
    """[Q, C] whether each new token sees each position from `begin` on."""
    query_at = torch.arange(context - num_new, context)[:, None]
    key_at = torch.arange(begin, context)
    return (key_at <= query_at) & (key_at >= first_seen(query_at, window))
