"""Packing of chunks into the words of one pass, the only part of a pass that knows sequences.

T tokens of S rows follow one another, decoding ones (one token each) first: a chunk is a row, or one for each token where it
verifies a draft. Only block tables, items of attention and a captured graph's room are padded.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engine.arrays import Integers, Ints, Longs
from engine.batch.layout import (
    GraphSize,
    HeadsSize,
    MadeSize,
    Packed,
    PassSize,
    PromptsSize,
    StatesSize,
    item_copies,
)
from engine.kernels.attention import LONGEST_STEP
from engine.kernels.delta import max_tiles
from engine.kernels.mla import UP_PROJECTED_TILING
from engine.passes import InvalidChunkError
from engine.sequence import Chunk
from engine.step.block_tables import BlockTables
from engine.step.limits import HeadLimits, Limits, check
from engine.step.singles import NO_SINGLES, Singles, block_tables
from engine.step.staging import NewestTokens
from engine.step.states import States


def pack(
    chunks: SequenceOf[Chunk],
    newest: NewestTokens,
    tables: BlockTables,
    limits: Limits,
    *,
    graph: GraphSize | None = None,
) -> Packed:
    """Check the chunks, decoding ones first, and lay out their inputs, for a captured graph if one is given.

    Raises InvalidChunkError.
    """
    for chunk in chunks:
        check(chunk, newest, limits)
    decoding = [chunk for chunk in chunks if chunk.decodes]
    chunk_of, lengths, ends, drafted = _rows(chunks)
    num_decode = sum(chunk.num_tokens for chunk in decoding)
    rows = np.array(tables.rows_of(chunks), dtype=np.int64)[chunk_of]
    sampled, sampled_ends = _sampled(chunks, chunk_of, ends)
    token_ends = np.cumsum(lengths)
    tokens = _tokens(chunks, newest, tables, rows, lengths, ends - token_ends, limits)

    windows = [heads.windows for heads in limits.attention]
    wanted = item_copies(windows, limits.tables.count - 1)
    cuts = [(limits.attention[number], window, table) for number, window, table in wanted]
    some = slice(num_decode)
    found = block_tables(tables, rows[some], ends[some], limits)
    decode = Singles.of(ends[some], found, cuts, drafted=drafted[some])
    prompts, final = None, NO_SINGLES
    some = slice(num_decode, None)
    if len(decoding) < len(chunks):
        found = block_tables(tables, rows[some], ends[some], limits)
        prompts = _Prompts.of(lengths[some], ends[some], found, limits, graph, num_decode)
        found = block_tables(tables, rows[sampled], sampled_ends, limits)
        last = limits.last
        final = Singles.of(sampled_ends, found[last.table :][:1], [(last.heads, last.window, 0)])
    states = None
    if limits.tables.in_place is not None:
        places = num_decode if graph is None else graph.decoding
        moves = tables.decoding_states.moves(decoding, limits)
        states = States.of(moves, chunks[len(decoding) :], places, limits)
    if graph is not None:
        size = graph_size(graph, limits, decode, final, num_sampled=len(sampled))
    else:
        size = _tight_size(int(token_ends[-1]), len(sampled), limits, decode, prompts, final, states)

    packed = Packed.empty(size)
    _put_tokens(packed, tokens, num_decode)
    if size.sampled_rows:
        at = token_ends[sampled] - 1 - (ends[sampled] - sampled_ends)
        at[sampled >= num_decode] += size.decode.places - num_decode
        packed.put("sampled_rows", at)
    if prompts is not None:
        prompts.put(packed)
    if states is not None:
        states.put(packed)
    decode.put(packed, "decode")
    final.put(packed, "final")
    return packed


def _rows(chunks: SequenceOf[Chunk]) -> tuple[Longs, Longs, Longs, npt.NDArray[np.bool_]]:
    """Each row's chunk, its number of tokens, the position after it, and whether it is behind a drafted token [S]."""
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    ends = np.array([chunk.start for chunk in chunks], dtype=np.int64) + lengths
    if not any(chunk.drafted for chunk in chunks):
        return np.arange(len(chunks)), lengths, ends, np.zeros(len(chunks), dtype=np.bool_)
    rows = np.array([len(chunk.drafted) for chunk in chunks], dtype=np.int64) + 1
    chunk_of = np.repeat(np.arange(len(chunks)), rows)
    behind = (np.cumsum(rows) - 1)[chunk_of] - np.arange(len(chunk_of))  # rows of its chunk behind it
    drafted = np.diff(chunk_of, prepend=-1) == 0
    return chunk_of, (lengths - rows + 1)[chunk_of], ends[chunk_of] - behind, drafted


def _sampled(chunks: SequenceOf[Chunk], chunk_of: Longs, ends: Longs) -> tuple[Longs, Longs]:
    """The positions that need logits [R]: each one's row, and the position after it."""
    if not any(chunk.scored for chunk in chunks):
        sampled = np.flatnonzero(np.array([chunk.sample for chunk in chunks], dtype=np.bool_)[chunk_of])
        return sampled, ends[sampled]
    wanted = list[tuple[int, int]]()
    for row, (end, chunk) in enumerate(zip(ends.tolist(), (chunks[at] for at in chunk_of), strict=True)):
        wanted += [(row, chunk.start + 1 + at) for at in range(chunk.scored)]
        wanted += [(row, end)] if chunk.sample else []
    owners, wanted_ends = np.array(wanted, dtype=np.int64).T
    return owners, wanted_ends


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts, or parts of them, with the tiles of their attention."""

    lengths: Longs
    ends: Longs
    tables: Ints  # [copies, S, width]
    cuts: list[tuple[Integers, HeadsSize]]  # the tiles for each shape of heads
    blocks: Longs | None  # [copies, I, 2], the contexts' blocks; None: all tokens are new
    is_captured: bool

    @classmethod
    def of(
        cls, lengths: Longs, ends: Longs, tables: Ints, limits: Limits, graph: GraphSize | None, first_row: int
    ) -> _Prompts:
        """The source of keys and values: a graph with prompts only reads the projection; others read the pool."""
        up_projected_from = [len(ends)] * len(limits.attention)
        if graph is not None:
            has_context, longest = graph.decoding > 0, 1
        else:
            up_projected_from = [_first_up_projected(heads, lengths, ends) for heads in limits.attention]
            has_context, longest = (
                bool(np.any(lengths < ends)) or min(up_projected_from) < len(ends),
                int(lengths.max()),
            )
        starts, blocks = np.cumsum(lengths) - lengths, None
        if has_context:
            blocks, starts = _context_blocks(ends - lengths, ends, tables, limits)
        cuts = []
        for heads, first in zip(limits.attention, up_projected_from, strict=True):
            size = _heads_size(heads, longest, behind=has_context)
            tiles = heads.tiling.deal_out(lengths[:first], ends[:first], starts[:first], rows=size.tile_rows)
            if first < len(ends):
                made, before = _made(lengths, ends, starts, limits, first=first, first_row=first_row, tiles=len(tiles))
                tiles, size = np.concatenate((tiles, made)), msgspec.structs.replace(size, made=before)
            cuts.append((tiles, size))
        return cls(lengths, ends, tables, cuts, blocks, graph is not None)

    def size(self) -> PromptsSize:
        return PromptsSize(
            sequences=len(self.ends),
            width=self.tables.shape[2],
            blocks=0 if self.blocks is None else self.blocks.shape[1],
            tiles=max(len(tiles) for tiles, _ in self.cuts),
            max_query_len=int(self.lengths.max()),
            max_context_len=int(self.ends.max()),
        )

    def put(self, packed: Packed) -> None:
        for copy, (tiles, _) in enumerate(self.cuts):
            packed.put("tiles", tiles, copy=copy)
        if self.blocks is not None:
            packed.put_copies("context_blocks", self.blocks)
        if not self.is_captured:
            packed.put("query_start", np.cumsum(self.lengths), at=1)
            packed.put("context_len", self.ends)
            packed.put_copies("prompt_tables", self.tables)


def _made(
    lengths: Longs, ends: Longs, starts: Longs, limits: Limits, *, first: int, first_row: int, tiles: int
) -> tuple[Integers, MadeSize]:
    """The tiles of the up-projected prompts, from `first` on; and the sizes before theirs."""
    rows = UP_PROJECTED_TILING.rows(int(lengths[first:].max()), behind=False)
    made = UP_PROJECTED_TILING.deal_out(lengths[first:], ends[first:], starts[first:] - starts[first], rows=rows)
    tokens, blocks = first_row + int(lengths[:first].sum()), int(starts[first]) // limits.block_size
    return made, MadeSize(prompts=first, rows=tokens, tiles=tiles, blocks=blocks, tile_rows=rows)


def _first_up_projected(heads: HeadLimits, lengths: Longs, ends: Longs) -> int:
    """The first of the up-projected prompts at the end; past all prompts, if there are none."""
    if heads.forms is None:
        return len(ends)
    first = len(ends)
    while first and heads.forms.makes(int(lengths[first - 1]), int(ends[first - 1])):
        first -= 1
    return first


def _tight_size(
    num_tokens: int,
    num_sampled: int,
    limits: Limits,
    decode: Singles,
    prompts: _Prompts | None,
    final: Singles,
    states: States | None,
) -> PassSize:
    """The header of a pass without a graph, with exact sizes."""
    return PassSize(
        tokens=num_tokens,
        num_sampled=num_sampled,
        sampled_rows=num_sampled,
        attention=_without_prompts(limits) if prompts is None else tuple(size for _, size in prompts.cuts),
        last_window=limits.last.window,
        decode=decode.size(len(decode.ends), limits.attention),
        prompts=None if prompts is None else prompts.size(),
        states=None if states is None else states.size(),
        final=final.size(len(final.ends), [limits.last.heads]),
        more_tables=limits.tables.count - 1,
    )


def graph_size(
    graph: GraphSize,
    limits: Limits,
    decode: Singles = NO_SINGLES,
    final: Singles = NO_SINGLES,
    *,
    num_sampled: int | None = None,
) -> PassSize:
    """The header of a pass for this graph. All offsets but those of single queries' block tables depend on the graph only."""
    prompts, sampled_rows, attention = None, 0, _without_prompts(limits)
    if graph.prompts:
        sampled_rows = graph.num_sampled
        attention = tuple(_heads_size(heads, 1, behind=graph.decoding > 0) for heads in limits.attention)
        starts = graph.num_prompts - 1  # each prompt but the first may add a partial tile
        prompts = PromptsSize(
            blocks=limits.graph_blocks if graph.decoding else 0,
            tiles=max(max(-(-graph.prompts // each.tile_rows) + starts, each.tiles_at_once) for each in attention),
            max_query_len=graph.prompts,
            max_context_len=limits.graph_context if graph.decoding else 0,
        )
    return PassSize(
        graph=graph,
        tokens=graph.tokens,
        num_sampled=graph.num_sampled if num_sampled is None else num_sampled,
        sampled_rows=sampled_rows,
        attention=attention,
        last_window=limits.last.window,
        decode=decode.size(graph.decoding, limits.attention),
        prompts=prompts,
        states=_graph_states(graph, limits),
        final=final.size(sampled_rows, [limits.last.heads]),
        more_tables=limits.tables.count - 1,
    )


def _graph_states(graph: GraphSize, limits: Limits) -> StatesSize | None:
    if (group := limits.tables.in_place) is None:
        return None
    tiles = max_tiles(graph.prompts, graph.num_prompts, limits.block_size) if graph.prompts else 0
    return StatesSize(moves=graph.decoding, tiles=tiles, runs=graph.num_prompts, blocks=group.blocks)


def _heads_size(heads: HeadLimits, longest: int, *, behind: bool) -> HeadsSize:
    """The tiling of prompts for one shape of heads. `longest`: new tokens of a sequence; always 1 in a graph."""
    tiling = heads.tiling
    return HeadsSize(
        heads=heads.heads,
        windows=heads.windows,
        item_queries=heads.item_queries,
        tile_rows=tiling.rows(longest, behind=behind),
        tiles_at_once=tiling.at_once,
    )


def _without_prompts(limits: Limits) -> tuple[HeadsSize, ...]:
    return tuple(
        HeadsSize(heads=heads.heads, windows=heads.windows, item_queries=heads.item_queries)
        for heads in limits.attention
    )


def _tokens(
    chunks: SequenceOf[Chunk],
    newest: NewestTokens,
    tables: BlockTables,
    rows: Longs,
    lengths: Longs,
    shifts: Longs,
    limits: Limits,
) -> dict[str, Longs]:
    """The fields [copies, T] of each token; its position is its number in T plus its row's `shifts` [S]."""
    owner = np.repeat(np.arange(len(lengths)), lengths)  # [T]: the row of each token
    token_ids, sources = _token_ids(chunks, newest)
    _check_ids(token_ids, chunks, limits)
    positions = np.arange(len(owner)) + shifts[owner]
    number, offset = np.divmod(positions, limits.block_size)
    slots = tables.table[:, rows[owner], number] * limits.block_size + offset
    one = {"token_ids": token_ids, "sources": sources, "positions": positions}
    return {name: values[None] for name, values in one.items()} | {"slots": slots}


def _put_tokens(packed: Packed, tokens: dict[str, Longs], num_decode: int) -> None:
    """Write tokens; prompts' go after the slots for decoding ones."""
    for name, copies in tokens.items():
        for copy, values in enumerate(copies):
            packed.put(name, values[:num_decode], copy=copy)
            packed.put(name, values[num_decode:], at=packed.size.decode.places, copy=copy)


def _token_ids(chunks: SequenceOf[Chunk], newest: NewestTokens) -> tuple[Longs, Longs]:
    """[T] ids that the host knows, else 0; [T] rows of `newest` for the others, else -1."""
    token_ids: list[int] = []
    pending: list[tuple[int, int]] = []
    for chunk in chunks:
        known = [*chunk.sequence.token_ids[chunk.start : chunk.end], *chunk.drafted]
        token_ids += known
        if len(known) < chunk.num_tokens:
            row = newest.row_of(chunk.sequence)
            assert row is not None, "checked"
            pending.append((len(token_ids), row))
            token_ids.append(0)
    sources = np.full(len(token_ids), -1, dtype=np.int64)
    for at, row in pending:
        sources[at] = row
    return np.array(token_ids, dtype=np.int64), sources


def _check_ids(token_ids: Longs, chunks: SequenceOf[Chunk], limits: Limits) -> None:
    if wrong := np.flatnonzero((token_ids < 0) | (token_ids >= limits.vocab_size)).tolist():
        ends = np.cumsum([chunk.num_tokens for chunk in chunks])
        request_id = chunks[np.searchsorted(ends, wrong[0], side="right")].sequence.request_id
        raise InvalidChunkError(
            f"request {request_id}: token id {token_ids[wrong[0]]} is not in [0, {limits.vocab_size})"
        )


def _context_blocks(starts: Longs, ends: Longs, tables: Ints, limits: Limits) -> tuple[Longs, Longs]:
    """The contexts' blocks [copies, I, 2], ids and written positions; and the row of each context's first key [S]."""
    counts = -(-ends // limits.block_size)
    at = np.arange(tables.shape[2])
    written = np.minimum(ends[:, None] - at * limits.block_size, limits.block_size)
    used = at < counts[:, None]
    ids = tables[:, used].astype(np.int64)
    blocks = np.stack((ids, np.broadcast_to(written[used], ids.shape)), axis=2)
    for paged in limits.tables.paged[1:]:
        # The loop step in which a window begins may begin before it, and there it must find numbers: of a block with
        # nothing written zeros are gathered, of a negative one nothing.
        near = -(-LONGEST_STEP // limits.block_size)
        before = np.array([paged.group.first_seen(start) for start in starts.tolist()])[:, None] - at
        blocks[paged.tables, ((before > 0) & (before <= near))[used]] = 0
    return blocks, (np.cumsum(counts) - counts) * limits.block_size
