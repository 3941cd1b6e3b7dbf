"""The contents of a KV block as data: sizes, memory layout and compatibility follow from it.

A block is one contiguous run of bytes with the layout's parts one after the other. A part is an array
[layers, planes, slots, heads, dim] of one dtype; it has `block_size` slots, or one if it is part of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from common.words import Keeps

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
LANE_BYTES = 4  # digests and copies count 32-bit words


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]  # gateways compute with a heartbeat's


class PagePart(msgspec.Struct, frozen=True, kw_only=True):
    """The array that some layers keep in each block."""

    layers: int
    planes: int  # 2: keys and values; 1: a latent or a recurrent state
    heads: int  # on this worker
    dim: int
    dtype: str
    per_token: bool = True  # False: one a sequence, in separate blocks
    window: _Count = 0  # sliding window in positions; 0: full attention
    first_head: int = 0  # first head of this worker in the whole model
    all_heads: int = 0  # heads of the whole model; 0: as many as here

    @property
    def num_all_heads(self) -> int:
        return self.all_heads or self.heads

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one slot. Raises ValueError for an unknown dtype."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r} of a KV pool: one of {', '.join(ITEM_BYTES)}")
        return self.dim * ITEM_BYTES[self.dtype]

    def slots(self, block_size: int) -> int:
        return block_size if self.per_token else 1

    def rows(self, block_size: int) -> int:
        """Groups of adjacent heads in a block: one a layer, plane and slot."""
        return self.layers * self.planes * self.slots(block_size)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of this part in a block."""
        return self.rows(block_size) * self.heads * self.head_bytes


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same positions: one table of entries in every sequence, in blocks of their own."""

    keeps: Keeps
    parts: tuple[PagePart, ...]  # what an entry consists of, see `engine.cache.pages`
    blocks_per_entry: _Count = 1
    window: _Count = 0  # positions, the own one included
    most_entries: _Count = 0  # a sequence needs at a time; 0: as many as blocks


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a pool: the number of blocks and the parts of one.

    Without `parts`: `kv[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`. With `parts`, the fields from
    `num_layers` to `dtype` describe the first of them, for older peers. Blocks of tokens are the first group, which keeps all.
    """

    num_blocks: _Count
    num_layers: _Count
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    num_kv_heads: _Count
    head_dim: _Count
    dtype: str  # a key of `ITEM_BYTES`
    parts: tuple[PagePart, ...] = ()
    groups: tuple[KVGroup, ...] = ()  # the further ones

    @classmethod
    def of(cls, parts: Sequence[PagePart], *, num_blocks: int, block_size: int) -> KVLayout:
        """Return the layout of these parts. Plain keys and values of whole layers leave `parts` empty."""
        first = parts[0]
        plain = cls(
            num_blocks=num_blocks,
            num_layers=first.layers,
            block_size=block_size,
            num_kv_heads=first.heads,
            head_dim=first.dim,
            dtype=first.dtype,
        )
        layout = msgspec.structs.replace(plain, parts=tuple(parts))
        return plain if layout.pages == plain.pages else layout

    @property
    def pages(self) -> tuple[PagePart, ...]:
        """The parts of a block, in the order of its bytes; equal for layouts whose blocks are equal."""
        plain = PagePart(layers=self.num_layers, planes=2, heads=self.num_kv_heads, dim=self.head_dim, dtype=self.dtype)
        return tuple(msgspec.structs.replace(part, all_heads=part.num_all_heads) for part in self.parts or (plain,))

    @property
    def block_bytes(self) -> int:
        return sum(part.block_bytes(self.block_size) for part in self.pages)

    def blocks_beside(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens needs at most at a time, besides those of its tokens."""
        blocks = -(-num_tokens // self.block_size)
        return sum(each.blocks_per_entry * min(blocks, each.most_entries or blocks) for each in self.groups)

    def compatible_with(self, other: KVLayout) -> bool:
        """True if blocks can move between the two pools unchanged (pool sizes may differ)."""
        return all(getattr(self, name) == getattr(other, name) for name in ("block_size", "pages", "groups"))
