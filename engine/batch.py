"""Chunks -> the inputs of one forward pass, packed into one run of int32 so that they reach the device in one copy.

T tokens of S chunks lie one behind the other, those that decode (one token each) first; nothing is padded but the block tables,
and what a captured graph has room for. Between passes the host keeps each sequence's block table as a row of a
matrix, because building it anew from Python's lists would take longer than a small model's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.kernels.attention import (
    AttentionBatch,
    AttentionPlan,
    DecodeItems,
    PrefillPlan,
    Tiling,
    deal_out,
    max_items,
    point,
)
from engine.newest import NewestTokens
from engine.passes import InvalidChunkError
from engine.sequence import Chunk, Sequence

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger[Any]]]


GRAPH_CONTEXT = 16384  # positions of all prompts together that a graph has room for beside decoding
GRAPH_PROMPTS = 4  # prompts in it at most


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a captured pass has room for: `decoding` tokens and, behind them, `prompts` tokens of prompts.

    Without decoding ones: of one whole prompt.
    """

    decoding: int
    prompts: int = 0

    @property
    def tokens(self) -> int:
        return self.decoding + self.prompts

    @property
    def num_prompts(self) -> int:
        return 0 if not self.prompts else GRAPH_PROMPTS if self.decoding else 1

    @property
    def num_sampled(self) -> int:
        return self.decoding + self.num_prompts

    def spread(self, values: Integers, num_decode: int, fill: int) -> Integers:
        """[T] -> [tokens]: both parts at their places, `fill` between and behind."""
        spread = np.full(self.tokens, fill, dtype=values.dtype)
        spread[:num_decode] = values[:num_decode]
        spread[self.decoding : self.decoding + len(values) - num_decode] = values[num_decode:]
        return spread


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of `Decoder.forward`, on the device."""

    token_ids: torch.Tensor  # [T] int32
    sources: torch.Tensor  # [T] int32: row of `newest` that holds the token; -1: `token_ids` does
    newest: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [T] int32
    slots: torch.Tensor  # [T] int32: block * block_size + offset, where each token's KV goes; -1: nowhere
    attention: AttentionPlan
    final: (
        AttentionPlan | None
    )  # of the sampled rows alone, for the last layer of a pass with prompts; None: of all, or of none
    sampled_rows: torch.Tensor | None  # [R] int32: rows of T whose logits are wanted; None = all (decoding only)
    num_sampled: int


class Packed:
    """Named int32 arrays, one behind the other."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._arrays: list[tuple[int, Ints]] = []
        self.size = 0

    def add(self, name: str, values: Integers) -> None:
        self._places[name] = (self.size, values.shape)
        self._arrays.append((self.size, values.astype(np.int32, copy=False)))
        self.size += -(-values.size // 4) * 4  # 16-byte boundaries

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def offset(self, name: str) -> int:
        return self._places[name][0]

    def write(self, target: Ints) -> None:
        """Copy everything into `target` [at least `size`]."""
        for start, values in self._arrays:
            target[start : start + values.size] = values.reshape(-1)

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The array's place in `buffer`, which holds what `write` wrote."""
        start, shape = self._places[name]
        return buffer[start : start + int(np.prod(shape))].view(shape)


@dataclass(slots=True)
class _Row:
    """One sequence's block table on the host; `source` is the list it was copied from."""

    index: int
    source: list[int]
    num_blocks: int = 0


@dataclass(slots=True)
class BlockTables:
    """[rows, max_blocks] int32: the block tables of the sequences that were in a pass, kept up to date by what was appended."""

    max_blocks: int
    num_blocks: int  # of the pool: ids must be below it
    num_rows: int = 8  # to begin with
    table: Ints = field(init=False)
    _rows: weakref.WeakKeyDictionary[Sequence, _Row] = field(init=False, default_factory=weakref.WeakKeyDictionary)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.zeros(
            (self.num_rows, self.max_blocks), dtype=np.int32
        )  # the system gives memory as it is touched
        self._free = list(range(self.num_rows - 1, -1, -1))

    def rows_of(self, chunks: SequenceOf[Chunk]) -> list[int]:
        """Return each chunk's row. Raises InvalidChunkError for a block that is not in the pool."""
        return [self._sync(chunk.sequence) for chunk in chunks]

    def _sync(self, sequence: Sequence) -> int:
        blocks, row = sequence.block_table, self._rows.get(sequence)
        if row is None:
            row = _Row(self._take(), blocks)
            self._rows[sequence] = row
            weakref.finalize(sequence, self._free.append, row.index).atexit = False
        elif row.source is not blocks or len(blocks) < row.num_blocks:
            row.source, row.num_blocks = blocks, 0
        if (count := len(blocks)) > row.num_blocks:
            added = np.array(blocks[row.num_blocks : count], dtype=np.int64)
            if wrong := added[(added < 0) | (added >= self.num_blocks)].tolist():
                raise InvalidChunkError(
                    f"request {sequence.request_id}: block {wrong[0]} is not in [0, {self.num_blocks})"
                )
            self.table[row.index, row.num_blocks : count] = added
            row.num_blocks = count
        return row.index

    def _take(self) -> int:
        if not self._free:
            count = len(self.table)
            self.table = np.concatenate((self.table, np.zeros((max(8, count), self.max_blocks), dtype=np.int32)))
            self._free.extend(range(len(self.table) - 1, count - 1, -1))
        return self._free.pop()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a chunk may ask for, and the shape of what it attends to."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int
    num_kv_heads: int
    tiling: Tiling
    windows: tuple[int, ...]  # distinct ones of the model's layers
    last_window: int  # of the last layer


def decodes(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1


def check(chunk: Chunk, newest: NewestTokens, limits: Limits) -> None:
    """Raise InvalidChunkError when a chunk contradicts its sequence or the limits."""
    sequence = chunk.sequence
    num_known, end = len(sequence.token_ids), chunk.end
    pending = end == num_known + 1 and newest.row_of(sequence) is not None
    if chunk.num_tokens < 1 or chunk.start < 0 or end > num_known + pending:
        problem = f"a chunk of {chunk.num_tokens} at {chunk.start} of {num_known + pending} tokens"
    elif chunk.sample and end < num_known:
        problem = f"asked to sample at position {end} of {num_known} known tokens"
    elif end > limits.max_model_len:
        problem = f"{end} tokens, the model takes {limits.max_model_len}"
    elif end > len(sequence.block_table) * limits.block_size:
        problem = f"{len(sequence.block_table)} blocks don't cover {end} positions"
    else:
        return
    raise InvalidChunkError(f"request {sequence.request_id}: {problem}")


def pack(
    chunks: SequenceOf[Chunk],
    newest: NewestTokens,
    tables: BlockTables,
    limits: Limits,
    *,
    room: GraphSize | None = None,
) -> Packed:
    """Check the chunks, decoding ones first, and lay out their inputs, for the graph of size `room` if there is one.

    An id out of range would kill the whole device context on a GPU; here it is one comparison. Raises InvalidChunkError.
    """
    for chunk in chunks:
        check(chunk, newest, limits)
    num_decode = sum(map(decodes, chunks))
    rows = np.array(tables.rows_of(chunks), dtype=np.int64)
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    ends = np.array([chunk.end for chunk in chunks], dtype=np.int64)
    query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    token_ids, sources = _token_ids(chunks, newest, int(query_start[-1]))
    owner = np.repeat(np.arange(len(chunks)), lengths)  # [T]: the chunk of each token
    positions = np.arange(len(owner)) + (ends - query_start[1:])[owner]
    slots = (
        tables.table[rows[owner], positions // limits.block_size] * limits.block_size + positions % limits.block_size
    )
    if wrong := np.flatnonzero((token_ids < 0) | (token_ids >= limits.vocab_size)).tolist():
        request_id = chunks[owner[wrong[0]]].sequence.request_id
        raise InvalidChunkError(
            f"request {request_id}: token id {token_ids[wrong[0]]} is not in [0, {limits.vocab_size})"
        )

    packed = Packed()
    for name, values, fill in (
        ("token_ids", token_ids, 0),
        ("sources", sources, -1),
        ("positions", positions, 0),
        ("slots", slots, -1),
    ):
        packed.add(name, values if room is None else room.spread(values, num_decode, fill))
    sampled = np.flatnonzero([chunk.sample for chunk in chunks])
    sampled_rows, prompts = query_start[1:][sampled] - 1, slice(num_decode, None)
    has_prompts = num_decode < len(chunks)
    if room is not None:
        sampled_rows[sampled >= num_decode] += room.decoding - num_decode
        sampled_rows = _padded(sampled_rows, room.num_sampled) if room.prompts else sampled_rows[:0]
    packed.add("sampled_rows", sampled_rows)
    if has_prompts:
        matrix = _tables(tables, rows[prompts], ends[prompts], limits)
        if room is not None:
            _add_prompts(packed, lengths[prompts], ends[prompts], matrix, limits, room)
        else:
            packed.add("prefill.query_start", query_start[prompts] - query_start[num_decode])
            _add_prefill(packed, lengths[prompts], ends[prompts], matrix, limits)
    singles = _add_singles(packed, ends[:num_decode], ends[sampled] if has_prompts else ends[:0], limits, room)
    for name, some in (("decode", slice(num_decode)), ("final", sampled)):
        if name in singles:
            _add_tables(packed, name, _tables(tables, rows[some], ends[some], limits), singles[name])
    return packed


def unpack(
    packed: Packed, buffer: torch.Tensor, newest: torch.Tensor, chunks: SequenceOf[Chunk], limits: Limits
) -> ForwardBatch:
    """The views of a buffer that holds what `pack` laid out."""
    num_decode = sum(map(decodes, chunks))

    def view(name: str) -> torch.Tensor:
        return packed.view(buffer, name)

    decode, prefill, final = None, None, None
    if num_decode:
        decode = _single(view, "decode", chunks[:num_decode])
    if num_decode < len(chunks):
        batch = AttentionBatch(
            query_start=view("prefill.query_start"),
            context_len=view("prefill.context_len"),
            block_table=view("prefill.tables"),
            max_query_len=max(chunk.num_tokens for chunk in chunks[num_decode:]),
            max_context_len=max(chunk.end for chunk in chunks[num_decode:]),
        )
        blocks = view("prefill.blocks") if "prefill.blocks" in packed else None
        rows = limits.tiling.rows(batch.max_query_len, behind=blocks is not None)
        prefill = PrefillPlan(batch, view("prefill.tiles"), rows, limits.tiling.at_once, blocks)
        if sampling := [chunk for chunk in chunks if chunk.sample]:
            batch, items = _single(view, "final", sampling), _items(view, "final", (limits.last_window,))
            final = AttentionPlan(len(sampling), batch, items, buffer, None)
    items = _items(view, "decode", limits.windows) if num_decode else {}
    return ForwardBatch(
        token_ids=view("token_ids"),
        sources=view("sources"),
        newest=newest,
        positions=view("positions"),
        slots=view("slots"),
        attention=AttentionPlan(num_decode, decode, items, buffer, prefill),
        final=final,
        sampled_rows=view("sampled_rows"),
        num_sampled=sum(chunk.sample for chunk in chunks),
    )


def _single(view: Callable[[str], torch.Tensor], name: str, chunks: SequenceOf[Chunk]) -> AttentionBatch:
    """One query of each chunk, its last token."""
    ends = view(f"{name}.ends")
    return AttentionBatch(
        query_start=torch.arange(len(chunks) + 1, dtype=torch.int32) if ends.device.type == "cpu" else ends,
        context_len=ends,
        block_table=view(f"{name}.tables"),
        max_query_len=1,
        max_context_len=max(chunk.end for chunk in chunks),
    )


def _items(view: Callable[[str], torch.Tensor], name: str, windows: SequenceOf[int]) -> dict[int, DecodeItems]:
    return {window: DecodeItems(view(f"{name}.items.{window}"), view(f"{name}.parts.{window}")) for window in windows}


def graph_layout(room: GraphSize, limits: Limits) -> Packed:
    """What `pack(..., room=room)` lays out, with nothing to do in it: a graph is captured with this."""
    packed = Packed()
    for name, fill in (("token_ids", 0), ("sources", -1), ("positions", 0), ("slots", -1)):
        packed.add(name, np.full(room.tokens, fill, dtype=np.int32))
    packed.add("sampled_rows", np.zeros(room.num_sampled if room.prompts else 0, dtype=np.int32))
    if room.prompts:
        packed.add("prefill.tiles", np.zeros((_num_tiles(room, limits), 8), dtype=np.int32))
        if room.decoding:
            packed.add("prefill.blocks", np.full((GRAPH_CONTEXT // limits.block_size, 2), -1, dtype=np.int32))
    nobody = np.zeros(0, dtype=np.int64)
    _add_singles(packed, nobody, nobody, limits, room)
    return packed


def unpack_graph(
    packed: Packed, room: GraphSize, buffer: torch.Tensor, newest: torch.Tensor, limits: Limits
) -> ForwardBatch:
    """The views of `buffer` that a graph is captured with; their places depend on the graph's size alone."""

    def view(name: str) -> torch.Tensor:
        return packed.view(buffer, name)

    prompts, final = None, None
    if room.prompts:
        final = AttentionPlan(room.num_sampled, None, _items(view, "final", (limits.last_window,)), buffer, None)
        nothing = buffer[:0]
        batch = AttentionBatch(
            nothing, nothing, nothing, max_query_len=room.prompts, max_context_len=GRAPH_CONTEXT if room.decoding else 0
        )
        blocks = view("prefill.blocks") if room.decoding else None
        prompts = PrefillPlan(batch, view("prefill.tiles"), _graph_rows(room, limits), limits.tiling.at_once, blocks)
    return ForwardBatch(
        token_ids=view("token_ids"),
        sources=view("sources"),
        newest=newest,
        positions=view("positions"),
        slots=view("slots"),
        attention=AttentionPlan(
            room.decoding,
            None,
            _items(view, "decode", limits.windows) if room.decoding else {},
            buffer,
            prompts,
        ),
        final=final,
        sampled_rows=view("sampled_rows") if room.prompts else None,
        num_sampled=room.num_sampled,
    )


def _graph_rows(room: GraphSize, limits: Limits) -> int:
    """Queries of a tile in a graph, whatever its contexts are."""
    return limits.tiling.rows(1, behind=room.decoding > 0)


def _num_tiles(room: GraphSize, limits: Limits) -> int:
    """The most tiles of a graph's prompts, parts counted each."""
    return max(-(-room.prompts // _graph_rows(room, limits)) + (room.num_prompts - 1), limits.tiling.at_once)


def _add_prompts(packed: Packed, lengths: Longs, ends: Longs, matrix: Ints, limits: Limits, room: GraphSize) -> None:
    """The prompts' part in a graph: their contexts' blocks, unless it is one whole prompt, which the projection holds."""
    blocks, block_starts = _context_blocks(ends, matrix, limits)
    starts = block_starts if room.decoding else np.zeros(1, dtype=np.int64)
    tiles = limits.tiling.deal_out(lengths, ends, starts, rows=_graph_rows(room, limits))
    packed.add("prefill.tiles", _padded(tiles, _num_tiles(room, limits)))
    if room.decoding:
        packed.add("prefill.blocks", _padded(blocks, GRAPH_CONTEXT // limits.block_size, -1))


def _add_singles(
    packed: Packed, decoding: Longs, sampled: Longs, limits: Limits, room: GraphSize | None
) -> dict[str, list[Integers]]:
    """The sequences of one query each, by where their contexts end: those that decode, and whoever is sampled beside prompts.

    Returns the items of each part that is there; their tables come behind everything of fixed size.
    """
    parts = (
        ("decode", decoding, room.decoding if room else len(decoding), limits.windows),
        ("final", sampled, room.num_sampled if room and room.prompts else len(sampled), (limits.last_window,)),
    )
    found = {}
    for name, ends, count, windows in parts:
        if count:
            found[name] = [_add_items(packed, name, ends, count, window, limits) for window in windows]
            packed.add(f"{name}.ends", _padded(ends, count))
    return found


def _add_items(packed: Packed, name: str, ends: Longs, count: int, window: int, limits: Limits) -> Integers:
    items: Integers = np.zeros((0, 8), dtype=np.int32)
    parts: Integers = np.zeros((0, 2), dtype=np.int32)
    if len(ends):
        items, parts = deal_out(ends, window=window, num_kv_heads=limits.num_kv_heads)
    items = _padded(items, max_items(count, limits.num_kv_heads), -1)
    packed.add(f"{name}.items.{window}", items)
    packed.add(f"{name}.parts.{window}", _padded(parts, count))
    return items


def _add_tables(packed: Packed, name: str, matrix: Ints, items: SequenceOf[Integers]) -> None:
    """The block tables, to which the items of a part are pointed, in place."""
    for some in items:
        point(some, packed.size, matrix.shape[1])
    packed.add(f"{name}.tables", matrix)


def _add_prefill(packed: Packed, lengths: Longs, ends: Longs, matrix: Ints, limits: Limits) -> None:
    """The prompts' part; their contexts' blocks if any has a context beside its new tokens."""
    has_context = bool(np.any(lengths < ends))
    blocks, block_starts = _context_blocks(ends, matrix, limits)
    if has_context:
        packed.add("prefill.blocks", blocks)
    starts = block_starts if has_context else np.cumsum(lengths) - lengths
    rows = limits.tiling.rows(int(lengths.max()), behind=has_context)
    packed.add("prefill.tiles", limits.tiling.deal_out(lengths, ends, starts, rows=rows))
    packed.add("prefill.context_len", ends)
    packed.add("prefill.tables", matrix)


def _context_blocks(ends: Longs, matrix: Ints, limits: Limits) -> tuple[Longs, Longs]:
    """[I, 2]: blocks of contexts that end at `ends` [S], ids and written positions; [S]: where each one's first key then lies."""
    counts = -(-ends // limits.block_size)
    column = np.arange(matrix.shape[1])
    written = np.minimum(ends[:, None] - column * limits.block_size, limits.block_size)
    used = column < counts[:, None]
    return np.stack((matrix[used], written[used]), axis=1), (np.cumsum(counts) - counts) * limits.block_size


def _tables(
    tables: BlockTables,
    rows: Longs,
    ends: Longs,
    limits: Limits,
) -> Ints:
    width = -(-int(ends.max(initial=0)) // limits.block_size)
    return tables.table[rows, :width]


def _padded(values: Integers, length: int, fill: int = 0) -> Integers:
    if len(values) >= length:
        return values
    padded = np.full((length, *values.shape[1:]), fill, dtype=values.dtype)
    padded[: len(values)] = values
    return padded


def _token_ids(chunks: SequenceOf[Chunk], newest: NewestTokens, count: int) -> tuple[Longs, Longs]:
    """[T] ids that the host knows, else 0; [T] rows of `newest` for the others, else -1."""
    token_ids, sources = np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    at = 0
    for chunk in chunks:
        known = chunk.sequence.token_ids[chunk.start : chunk.end]
        token_ids[at : at + len(known)] = known
        at += chunk.num_tokens
        if len(known) < chunk.num_tokens:
            row = newest.row_of(chunk.sequence)
            assert row is not None, "checked"
            sources[at - 1] = row
    return token_ids, sources


def known_tokens(chunk: Chunk, newest: Mapping[Sequence, int]) -> list[int]:
    """Return the sequence's tokens up to the chunk's end, the last one from `newest` if the sequence does not hold it yet."""
    tokens = chunk.sequence.token_ids[: chunk.end]
    if len(tokens) < chunk.end:
        tokens.append(newest[chunk.sequence])
    return tokens
