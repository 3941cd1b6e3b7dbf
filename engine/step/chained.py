"""Passes of single queries one after another in one captured graph: a chain's steps, or what layers of a block see.

Their inputs come in one copy. Block tables, one a sequence, come last: a captured graph does not know their width.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.arrays import Ints, Longs
from engine.batch.batch import ForwardBatch, batch_of
from engine.batch.layout import GraphSize, HeadsSize, Layout, Packed, PassSize, SinglesSize
from engine.kernels.attention import deal_out, max_items
from engine.step.limits import HeadLimits


@dataclass(frozen=True, slots=True)
class Queries:
    """Rows of a pass; its others compute nothing that is kept."""

    rows: Longs  # [N], ascending
    sequences: Longs  # [N]: the row of its block table
    ends: Longs  # [N]: the position before each is the row's
    seen: Longs  # [N]: the end of what each attends to


class Chained:
    """The layout of `passes` passes of `rows` rows."""

    def __init__(self, heads: SequenceOf[HeadLimits], *, rows: int, passes: int, block_size: int) -> None:
        self._cuts = [(shape, window) for shape in heads for window in shape.windows]
        self._size = PassSize(
            graph=GraphSize(rows),
            tokens=rows,
            num_sampled=rows,
            sampled_rows=0,
            attention=tuple(HeadsSize(heads=shape.heads, windows=shape.windows) for shape in heads),
            decode=SinglesSize(places=rows, items=max(max_items(rows, shape.items_at_once) for shape in heads)),
        )
        self._layout, self._passes, self._block_size = Layout(self._size), passes, block_size

    @property
    def words(self) -> int:
        """The words before the block tables."""
        return self._passes * self._layout.words

    def empty(self) -> Ints:
        """The words of passes without queries, to capture a graph with."""
        return self.pack([], np.zeros((0, 0), dtype=np.int32))

    def pack(self, passes: SequenceOf[Queries], tables: Ints) -> Ints:
        """The words of the first passes, the others being empty; `tables` [S, width] of block ids."""
        packed = [self._packed(queries, tables, number) for number, queries in enumerate(passes)]
        packed += [Packed.empty(self._size)] * (self._passes - len(packed))
        return np.concatenate([*(each.words for each in packed), tables.ravel()])

    def batches(self, buffer: torch.Tensor, newest: torch.Tensor) -> list[ForwardBatch]:
        """The inputs of each pass, in a buffer with the packed words."""
        step = self._layout.words
        return [batch_of(self._size, self._layout, buffer[number * step :], newest) for number in range(self._passes)]

    def _packed(self, queries: Queries, tables: Ints, pass_number: int) -> Packed:
        packed = Packed.empty(self._size)
        number, offset = np.divmod(queries.ends - 1, self._block_size)
        packed.put_rows("positions", queries.rows, queries.ends - 1)
        slots = tables[queries.sequences, number].astype(np.int64) * self._block_size + offset
        packed.put_rows("slots", queries.rows, slots)
        # Offsets count from this pass's words.
        first_table = (self._passes - pass_number) * self._layout.words
        for copy, (shape, window) in enumerate(self._cuts):
            items, parts = deal_out(queries.seen, window=window, at_once=shape.items_at_once, queries=1)
            own = items[:, 0]
            items[:, 4] = first_table + queries.sequences[own] * tables.shape[1]
            items[:, 0] = queries.rows[own]
            packed.put("decode_items", items, copy=copy)
            packed.put_rows("decode_parts", queries.rows, parts, copy=copy)
        return packed
