"""Chunks -> the tensors of one forward pass.

T tokens of S chunks lie one behind the other; nothing is padded but the block tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.kernels.attention import AttentionBatch
from engine.passes import InvalidChunkError
from engine.sequence import Chunk, Sequence


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
    newest: Mapping[Sequence, int],
    block_size: int,
    num_blocks: int,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
) -> ForwardBatch:
    """Check the chunks and lay them out. Raises InvalidChunkError naming the request that is wrong.

    `newest`: the tokens that the pass before sampled, for chunks that begin with one that their sequence does not hold yet.
    """
    for chunk in chunks:
        _check(chunk, newest, block_size, max_model_len)
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    ends = np.array([chunk.end for chunk in chunks], dtype=np.int64)
    query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])

    owner = np.repeat(np.arange(len(chunks)), lengths)  # [T]: the chunk of each token
    positions = np.arange(query_start[-1]) + (ends - query_start[1:])[owner]
    token_ids = _token_ids(chunks, newest, int(query_start[-1]))
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


def _check(chunk: Chunk, newest: Mapping[Sequence, int], block_size: int, max_model_len: int) -> None:
    sequence = chunk.sequence
    num_known = len(sequence.token_ids)
    num_tokens = max(num_known, chunk.end if chunk.end == num_known + 1 and sequence in newest else 0)
    if chunk.num_tokens < 1 or chunk.end > num_tokens:
        problem = f"a chunk of {chunk.num_tokens} at {chunk.start} of {num_tokens} tokens"
    elif chunk.sample and chunk.end < num_known:
        problem = f"asked to sample at position {chunk.end} of {num_known} known tokens"
    elif chunk.end > max_model_len:
        problem = f"{chunk.end} tokens, the model takes {max_model_len}"
    elif chunk.end > len(sequence.block_table) * block_size:
        problem = f"{len(sequence.block_table)} blocks don't cover {chunk.end} positions"
    else:
        return
    raise InvalidChunkError(f"request {sequence.request_id}: {problem}")


def known_tokens(chunk: Chunk, newest: Mapping[Sequence, int], start: int = 0) -> list[int]:
    """Return the sequence's tokens [start, chunk.end), the last one from `newest` if the sequence does not hold it yet."""
    tokens = chunk.sequence.token_ids[start : chunk.end]
    if len(tokens) < chunk.end - start:
        tokens.append(newest[chunk.sequence])
    return tokens


def _token_ids(
    chunks: SequenceOf[Chunk], newest: Mapping[Sequence, int], count: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    pieces = (known_tokens(chunk, newest, chunk.start) for chunk in chunks)
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
