"""The split of attention's work: prompts into tiles of queries, decoding into items of about equal length.

Long contexts are split along the context as well: a tile into parts. Items are data, so a captured graph stays valid.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.arrays import Integers, Longs
from engine.kernels.attention.plan import HeadShape, first_seen
from engine.kernels.device import Device

SMALL_TILE, LARGE_TILE = 64, 128  # queries of a tile of the prefill kernels
MAX_FEW_QUERIES = 512  # up to here small tiles keep more of the GPU busy
HOPPER_STEP = 128  # positions of a loop step of `triton_prefill_hopper`
LONGEST_STEP = 128  # positions of a loop step of any kernel for prompts
MIN_STEPS_PER_PART = 4  # loop steps; in shorter parts some queries could have all keys masked
STEP_POSITIONS = 64  # a loop step of `triton_decode`
PROGRAMS_PER_PROCESSOR = 2  # at once
# Rows of the tensor core's smallest tile: the heads of a group, for each query of an item.
TILE_ROWS = 16
MAX_ITEM_QUERIES = 8  # bounds the memory for items' parts
MAX_ROUNDS = 2  # long contexts are split into at most this many waves


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of a model's prompts on a device, see `dispatch.tiling`."""

    few: int  # queries of a tile in a small pass
    many: int  # queries of a tile in a large pass
    at_once: int = 0  # concurrent tiles; 0: they are not split into parts

    def rows(self, max_query_len: int, *, behind: bool) -> int:
        """Queries of a tile; `behind`: large tiles can be split along a context."""
        return self.many if max_query_len > MAX_FEW_QUERIES or (behind and self.at_once) else self.few

    def deal_out(self, query_len: Integers, context_len: Integers, context_start: Integers, *, rows: int) -> Integers:
        """`deal_out_tiles`, with parts where the kernel for these rows can combine them."""
        at_once = self.at_once if rows == self.many else 0
        return deal_out_tiles(query_len, context_len, context_start, rows=rows, at_once=at_once)


def deal_out_tiles(
    query_len: Integers, context_len: Integers, context_start: Integers, *, rows: int, at_once: int = 0
) -> Integers:
    """Split the queries of S sequences into tiles of `rows`, the most work first.

    Returns [I, 8] int32: first row, rows, position of the first row in its context, row of the context's first key, sequence,
    part, parts. If there are fewer than `at_once` tiles, those with long contexts appear once for each of their parts.
    """
    counts = -(-query_len // rows)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * rows
    tiles = np.zeros((len(owner), 8), dtype=np.int32)
    tiles[:, 0] = (np.cumsum(query_len) - query_len)[owner] + first
    tiles[:, 1] = np.minimum(rows, query_len[owner] - first)
    tiles[:, 2] = (context_len - query_len)[owner] + first
    tiles[:, 3] = context_start[owner]
    tiles[:, 4] = owner
    tiles = tiles[np.argsort(-tiles[:, 2], kind="stable")]
    steps = -(-(tiles[:, 2] + tiles[:, 1]) // HOPPER_STEP)
    tiles[:, 6] = np.clip(steps // MIN_STEPS_PER_PART, 1, max(1, at_once // max(1, len(tiles))))
    parts = np.repeat(tiles, tiles[:, 6], axis=0)
    parts[:, 5] = np.arange(len(parts)) - np.repeat(np.cumsum(tiles[:, 6]) - tiles[:, 6], tiles[:, 6])
    return parts


def items_at_once(device: Device, num_kv_heads: int) -> int:
    """Items that the device computes concurrently: one program for each key head."""
    return PROGRAMS_PER_PROCESSOR * device.processors // num_kv_heads


def item_queries(heads: HeadShape) -> int:
    """Queries of one sequence, a drafted token's each, that share the keys of an item: as many as a tile has rows for."""
    return max(1, min(MAX_ITEM_QUERIES, TILE_ROWS // (heads.num_heads // heads.num_kv_heads)))


def max_items(num_sequences: int, at_once: int) -> int:
    """Upper bound of the items that `deal_out` makes of so many sequences."""
    return num_sequences + MAX_ROUNDS * at_once


def deal_out(
    context_len: Integers, *, window: int, at_once: int, queries: int, drafted: npt.NDArray[np.bool_] | None = None
) -> tuple[Integers, Integers]:
    """Split contexts [S] into items of about equal length. Returns the items [I, 8] and parts [S, 2] of `DecodeItems`, int32.

    An item's columns: row of q (-1: nothing to do), first position, end, whether it is its sequence's only item, offset of the
    block table (`point` fills it in), rows of q, end of the first row's context. I is at most `max_items(S, at_once)`.
    `drafted` [S]: rows that verify a drafted token, one position behind the row before. Without a window they share its items,
    up to `queries` rows in all: each row's parts are `queries` apart.
    """
    row, count_of = _shared(context_len, queries, None if window else drafted)
    context_len, first_end = context_len[row + count_of - 1], context_len[row]
    first = np.maximum(first_seen(first_end - 1, window), 0)
    lengths = context_len - first
    counts = _ceil(lengths, _longest_item(lengths, at_once))
    each = _ceil(_ceil(lengths, counts), STEP_POSITIONS) * STEP_POSITIONS  # even pieces of whole loop steps
    counts = _ceil(lengths, each)
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(ends[-1]) - (ends - counts)[owner]
    items = np.zeros((len(owner), 8), dtype=np.int32)
    items[:, 0] = row[owner]
    items[:, 1] = first[owner] + piece * each[owner]
    items[:, 2] = np.minimum(items[:, 1] + each[owner], context_len[owner])
    items[:, 3] = (counts == 1)[owner]
    items[:, 5] = count_of[owner]
    items[:, 6] = first_end[owner]
    group = np.repeat(np.arange(len(row)), count_of)  # [S]
    parts = np.stack(((ends - counts)[group] * queries + np.arange(len(group)) - row[group], counts[group]), axis=1)
    return items, parts.astype(np.int32)


def _shared(context_len: Integers, queries: int, drafted: npt.NDArray[np.bool_] | None) -> tuple[Longs, Longs]:
    """The first row of each run of rows that share items, and their number."""
    rows = np.arange(len(context_len))
    if drafted is None or queries == 1 or not drafted.any():
        return rows, np.ones(len(rows), dtype=np.int64)
    own = np.maximum.accumulate(np.where(drafted, 0, rows))
    first = np.flatnonzero((rows - own) % queries == 0)
    return first, np.diff(first, append=len(rows))


def point(items: Integers, first: int, width: int) -> None:
    """Fill in the items' block tables: contiguous from offset `first`, `width` blocks each."""
    items[:, 4] = first + items[:, 0] * width


def _longest_item(lengths: Integers, at_once: int) -> int:
    """Positions of an item, in whole loop steps: the split of the longest context with the fewest steps.

    Cost: rounds of `at_once` items, times an item's steps plus one for its start.
    """
    steps = -(-int(lengths.max()) // STEP_POSITIONS)
    most = MAX_ROUNDS * at_once
    sizes = _sizes(steps, most)
    counts = _ceil(lengths[:, None], STEP_POSITIONS * sizes).sum(axis=0)
    cost = np.where(counts <= len(lengths) + most, _ceil(counts, at_once) * (sizes + 1), np.inf)
    return STEP_POSITIONS * int(sizes[np.argmin(cost)])


@functools.lru_cache(maxsize=1024)
def _sizes(steps: int, most: int) -> Longs:
    """The loop steps of an item, where so many are split into 1 to `most` items."""
    return np.unique(_ceil(np.full(most, steps), np.arange(1, most + 1)))


def _ceil(values: Integers, divisor: Integers | int) -> Integers:
    return -(-values // divisor)
