"""Chunks -> the tensors of one forward pass.

T tokens of S chunks lie one behind the other; nothing is padded but the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.kernels.attention import AttentionBatch
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step: positions [num_computed, num_computed + num_tokens)."""

    sequence: Sequence
    num_tokens: int
    sample: bool  # the chunk ends at the last known token: sample the next one

    @property
    def end(self) -> int:
        """Position behind the chunk: the context length after it."""
        return self.sequence.num_computed + self.num_tokens


class InvalidChunkError(ValueError):
    """A chunk that the engine can't compute. Nothing was computed, the pool is as it was."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of `Decoder.forward`, on the device."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64: block * block_size + offset, where each token's KV goes
    attention: AttentionBatch
    sampled_rows: torch.Tensor | None  # [R] int64: rows of T whose logits are wanted; None = none


def build_batch(
    chunks: SequenceOf[Chunk],
    *,
    block_size: int,
    num_blocks: int,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
) -> ForwardBatch:
    """Check the chunks and lay them out. Raises InvalidChunkError naming the request that is wrong."""
    for chunk in chunks:
        _check(chunk, block_size, max_model_len)
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    ends = np.array([chunk.end for chunk in chunks], dtype=np.int64)
    query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])

    owner = np.repeat(np.arange(len(chunks)), lengths)  # [T]: the chunk of each token
    positions = np.arange(query_start[-1]) + (ends - query_start[1:])[owner]
    token_ids = _token_ids(chunks, int(query_start[-1]))
    tables = _block_tables(chunks, block_size)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    _check_ids(token_ids, vocab_size, owner, chunks, "token id")
    _check_ids(slots // block_size, num_blocks, owner, chunks, "block")
    sampled = np.flatnonzero([chunk.sample for chunk in chunks])

    def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    return ForwardBatch(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        attention=AttentionBatch(
            query_start=tensor(query_start, torch.int32),
            context_len=tensor(ends, torch.int32),
            block_table=tensor(tables, torch.int32),
            max_query_len=int(lengths.max()),
            max_context_len=int(ends.max()),
        ),
        sampled_rows=tensor(query_start[1:][sampled] - 1, torch.int64) if sampled.size else None,
    )


def _check(chunk: Chunk, block_size: int, max_model_len: int) -> None:
    sequence = chunk.sequence
    if chunk.num_tokens < 1 or chunk.end > sequence.num_tokens:
        problem = f"a chunk of {chunk.num_tokens} at {sequence.num_computed} of {sequence.num_tokens} tokens"
    elif chunk.sample and chunk.end != sequence.num_tokens:
        problem = f"asked to sample at position {chunk.end} of {sequence.num_tokens} known tokens"
    elif chunk.end > max_model_len:
        problem = f"{chunk.end} tokens, the model takes {max_model_len}"
    elif chunk.end > len(sequence.block_table) * block_size:
        problem = f"{len(sequence.block_table)} blocks don't cover {chunk.end} positions"
    else:
        return
    raise InvalidChunkError(f"request {sequence.request_id}: {problem}")


def _token_ids(chunks: SequenceOf[Chunk], count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    pieces = (chunk.sequence.token_ids[chunk.sequence.num_computed : chunk.end] for chunk in chunks)
    return np.fromiter(chain.from_iterable(pieces), dtype=np.int64, count=count)


def _block_tables(chunks: SequenceOf[Chunk], block_size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[S, most blocks], as far as the contexts reach; padded with block 0, which no kernel reads there."""
    counts = [-(-chunk.end // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(counts)), dtype=np.int64)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row, :count] = chunk.sequence.block_table[:count]
    return tables


def _check_ids(
    ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    limit: int,
    owner: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    chunks: SequenceOf[Chunk],
    what: str,
) -> None:
    """An id out of range would kill the whole device context on a GPU; here it is one comparison."""
    wrong = np.flatnonzero((ids < 0) | (ids >= limit))
    if wrong.size:
        request_id = chunks[owner[wrong[0]]].sequence.request_id
        raise InvalidChunkError(f"request {request_id}: {what} {ids[wrong[0]]} is not in [0, {limit})")
