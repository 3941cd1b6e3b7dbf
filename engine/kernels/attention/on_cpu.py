"""Paged attention on a CPU: a row never depends on its batch. Single queries in float32 by a kernel in C, others by torch's.

Q new tokens, C positions of a context, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block size. What
that kernel doesn't know (soft-caps, sinks) is computed by `reference`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels import native
from engine.kernels.attention import reference
from engine.kernels.attention.plan import AttentionBatch, Scores, first_seen
from engine.kernels.codes import Codes, numbers_of
from engine.kernels.device import native_takes
from engine.kernels.once import Once


@dataclass(frozen=True, slots=True)
class _Reading:
    """Gathered contexts of a pass's decoding sequences, contiguous in `keys` and `values`."""

    blocks: torch.Tensor  # [N] of the pool
    keys: torch.Tensor  # [N, B, Hkv, D]
    values: torch.Tensor
    contexts: list[tuple[torch.Tensor, torch.Tensor]]  # views of each sequence's, [1, Hkv, C, D]

    @classmethod
    def of(cls, kv_layer: torch.Tensor, batch: AttentionBatch, window: int) -> _Reading:
        size, lengths = kv_layer.shape[2], batch.context_len.tolist()
        begins = [max(0, first_seen(length - 1, window)) for length in lengths]
        tables = [
            table[begin // size : -(-length // size)]
            for table, begin, length in zip(batch.block_table, begins, lengths, strict=True)
        ]
        blocks = torch.cat(tables)
        keys, values = (torch.empty((blocks.shape[0], *kv_layer.shape[2:]), dtype=kv_layer.dtype) for _ in range(2))
        contexts, at = [], 0
        for table, begin, length in zip(tables, begins, lengths, strict=True):
            first, number = at * size + begin % size, length - begin
            own = (x.flatten(0, 1)[first : first + number].transpose(0, 1).unsqueeze(0) for x in (keys, values))
            contexts.append((next(own), next(own)))
            at += table.shape[0]
        return cls(blocks, keys, values, contexts)


def attend(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    how: Scores,
    codes: Codes | None = None,
    once: Once | None = None,
) -> torch.Tensor:
    """Return the attention of `q` [T, Hq, D]; see `paged_attention`."""
    is_native = (codes is None or codes.in_half) and _is_native(q, kv_layer, batch, how)
    if batch.max_query_len == 1 and is_native:
        return _attend_natively(q, kv_layer, batch.block_table, batch.context_len, how)
    if how.softcap or how.sinks is not None:
        return reference.attend(q, kv_layer, batch, how, codes)
    if batch.max_query_len == 1 and codes is None:
        return _attend_singles(q, kv_layer, batch, how, once or Once())
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()

    def one(index: int, context: int) -> torch.Tensor:
        own, its = q[starts[index] : starts[index + 1]], slice(index, index + 1)
        if is_native and own.shape[0] == 1:  # as alone
            return _attend_natively(own, kv_layer, batch.block_table[its], batch.context_len[its], how)
        return _attend_one(own, kv_layer, batch.block_table[index], context, how, codes)

    found = [one(index, context) for index, context in enumerate(lengths)]
    return found[0] if len(found) == 1 else torch.cat(found)


# `Attention` of `engine/kernels/native/attention.c`.
_ATTENTION, _MOST_DIM = Struct("6P14qd"), 256


def _is_native(q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, how: Scores) -> bool:
    """True if the kernel in C computes it."""
    size = q.shape[2]
    return (
        not how.softcap
        and size % 8 == 0
        and size <= _MOST_DIM
        and (how.sinks is None or how.sinks.dtype == torch.float32)
        and native_takes(q, kv_layer, batch.block_table, batch.context_len)
    )


def _attend_natively(
    q: torch.Tensor, kv_layer: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, how: Scores
) -> torch.Tensor:
    """Attention of one new token each, read from the pool in place."""
    library, (num_rows, num_heads, size), (_, _, block_size, num_kv_heads, _) = (
        native.library(),
        q.shape,
        kv_layer.shape,
    )
    assert library is not None
    out, (of_block, of_plane, of_slot, of_head, _) = torch.empty(q.shape), kv_layer.stride()
    library.baton_attend(
        _ATTENTION.pack(
            q.data_ptr(), kv_layer.data_ptr(), tables.data_ptr(), lengths.data_ptr(),
            0 if how.sinks is None else how.sinks.data_ptr(), out.data_ptr(),
            num_rows, q.stride(0), num_heads, num_kv_heads, size, block_size, tables.stride(0),
            of_block, of_plane, of_slot, of_head, how.window, kv_layer.dtype == torch.float16,
            torch.get_num_threads(), how.scale,
        )
    )  # fmt: skip
    return out


def _attend_singles(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, how: Scores, once: Once
) -> torch.Tensor:
    """Attention of one new token each. The gathered buffers are reused by all layers."""
    key = (id(batch), how.window, kv_layer.shape[2:])
    reading = once(key, lambda: _Reading.of(kv_layer, batch, how.window))
    torch.index_select(kv_layer.select(1, 0), 0, reading.blocks, out=reading.keys)
    torch.index_select(kv_layer.select(1, 1), 0, reading.blocks, out=reading.values)
    # Heads that share a key form a batch of queries.
    queries = q.view(q.shape[0], 1, kv_layer.shape[3], -1, q.shape[2]).unbind(0)
    found = [
        scaled_dot_product_attention(query, keys, values, scale=how.scale)
        for query, (keys, values) in zip(queries, reading.contexts, strict=True)
    ]
    return (found[0] if len(found) == 1 else torch.cat(found)).reshape(q.shape)


def _attend_one(
    q: torch.Tensor, kv_layer: torch.Tensor, table: torch.Tensor, context: int, how: Scores, codes: Codes | None
) -> torch.Tensor:
    """`q` [Q, Hq, D] of one sequence -> [Q, Hq, D]."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    num_new, window = q.shape[0], how.window
    begin = max(0, first_seen(context - num_new, window))
    first = begin // block_size
    begin = begin if num_new == 1 else first * block_size
    table = table[first : -(-context // block_size)]
    read = slice(begin - first * block_size, context - first * block_size)
    keys, values = (  # [1, Hkv, C, D] of [blocks, B, Hkv, D]
        plane.flatten(0, 1)[read].transpose(0, 1).unsqueeze(0) for plane in _planes(kv_layer, table, codes)
    )
    if num_new == 1:  # heads that share a key form a batch of queries
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
    """[Q, C]: True where a new token attends to a position from `begin` on."""
    query_at = torch.arange(context - num_new, context)[:, None]
    key_at = torch.arange(begin, context)
    return (key_at <= query_at) & (key_at >= first_seen(query_at, window))
