"""Sequences with one query each: their part of a pass, or all of it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.arrays import Integers, Ints, Longs
from engine.batch.layout import HeadsSize, Packed, PassSize, SinglesSize
from engine.kernels.attention import deal_out, max_items, point
from engine.step.block_tables import BlockTables
from engine.step.limits import HeadLimits, Limits


@dataclass(frozen=True, slots=True)
class Singles:
    """Sequences with one query each, with the items of their attention for each shape of heads and window."""

    ends: Longs
    tables: Ints  # [copies, S, width]
    items: list[tuple[Integers, Integers, int]]  # items, parts, the copy of tables that they read

    @classmethod
    def of(
        cls,
        ends: Longs,
        tables: Ints,
        cuts: SequenceOf[tuple[HeadLimits, int, int]],
        *,
        drafted: npt.NDArray[np.bool_] | None = None,
    ) -> Singles:
        """`cuts`: heads, window and copy of tables of each list of items. `drafted`: see `deal_out`."""
        if not len(ends):
            return NO_SINGLES
        dealt = dict[tuple[int, int, int], tuple[Integers, Integers]]()  # shared by all copies of tables
        items = []
        for heads, window, table in cuts:
            kind = (heads.items_at_once, 1 if drafted is None else heads.item_queries, window)
            if kind not in dealt:
                at_once, queries, _ = kind
                dealt[kind] = deal_out(ends, window=window, at_once=at_once, queries=queries, drafted=drafted)
            items.append((*dealt[kind], table))
        return cls(ends, tables, items)

    def size(self, places: int, heads: SequenceOf[HeadLimits]) -> SinglesSize:
        return SinglesSize(
            places=places,
            items=max((max_items(places, shape.items_at_once) for shape in heads), default=0) if places else 0,
            sequences=len(self.ends),
            width=self.tables.shape[2],
            longest=int(self.ends.max(initial=0)),
        )

    def put(self, packed: Packed, name: str) -> None:
        if not len(self.ends):
            return
        first, _, _, step = packed.layout.places[f"{name}_tables"]
        for copy, (items, parts, table) in enumerate(self.items):
            point(items, first + table * step, self.tables.shape[2])
            packed.put(f"{name}_items", items, copy=copy)
            packed.put(f"{name}_parts", parts, copy=copy)
        packed.put(f"{name}_ends", self.ends)
        packed.put_copies(f"{name}_tables", self.tables)


NO_SINGLES = Singles(np.zeros(0, dtype=np.int64), np.zeros((1, 0, 0), dtype=np.int32), [])


def block_tables(tables: BlockTables, rows: Longs, ends: Longs, limits: Limits) -> Ints:
    """The block tables [copies, S, width]."""
    width = -(-int(ends.max(initial=0)) // limits.block_size)
    return tables.table[:, rows, :width]


def pack_singles(tables: Ints, ends: Longs, limits: Limits, heads: SequenceOf[HeadLimits], *, seen: Longs) -> Packed:
    """Lay out a pass over the last position before each end, with these heads alone and blocks of tokens; ids are not told.

    `tables` [S, W]: each one's blocks. `seen`: the end of what each attends to.
    """
    found = tables[None, :, : -(-int(seen.max(initial=0)) // limits.block_size)]
    cuts = [(shape, window, 0) for shape in heads for window in shape.windows]
    decode = Singles.of(seen, found, cuts)
    size = PassSize(
        tokens=len(ends),
        num_sampled=len(ends),
        sampled_rows=0,
        attention=tuple(HeadsSize(heads=shape.heads, windows=shape.windows) for shape in heads),
        decode=decode.size(len(ends), heads),
    )
    packed = Packed.empty(size)
    number, offset = np.divmod(ends - 1, limits.block_size)
    packed.put("positions", ends - 1)
    packed.put("slots", tables[np.arange(len(ends)), number].astype(np.int64) * limits.block_size + offset)
    decode.put(packed, "decode")
    return packed
