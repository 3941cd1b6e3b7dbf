"""Prefill attention, split into tiles of queries, and for long contexts into parts along the context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.arrays import Integers

SMALL_TILE, LARGE_TILE = 64, 128  # queries of a tile of the prefill kernels
MAX_FEW_QUERIES = 512  # up to here small tiles keep more of the GPU busy
HOPPER_STEP = 128  # positions of a loop step of `triton_prefill_hopper`
LONGEST_STEP = 128  # positions of a loop step of any kernel for prompts
MIN_STEPS_PER_PART = 4  # loop steps; in shorter parts some queries could have all keys masked


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
