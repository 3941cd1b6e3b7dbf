"""The contents of a KV block as data: sizes, memory layout and compatibility follow from it.

A block is one contiguous run of bytes: the layout's parts, one after the other. A part is an array [layers, planes, slots,
heads, dim] of one dtype: `block_size` slots, one in a state. A rank keeps some of the heads, a stage some of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated

import msgspec

from common.words import Keeps

STATE_ALIGNMENT = 16  # bytes
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
    # First and number of each run of `all_dim` that is here, where a rank cuts within the one head (a convolution); (): all.
    channels: tuple[tuple[int, int], ...] = ()
    all_dim: int = 0  # 0: `dim`
    first_layer: int = 0  # first of this stage's layers, among the model's that keep this
    all_layers: int = 0  # layers of the model that keep this; 0: as many as here

    @property
    def whole(self) -> PagePart:
        """The same part with all the model's heads and layers."""
        heads, dim, layers = self.all_heads or self.heads, self.all_dim or self.dim, self.all_layers or self.layers
        whole = {"heads": heads, "all_heads": heads, "dim": dim, "all_dim": dim, "layers": layers, "all_layers": layers}
        return msgspec.structs.replace(self, **whole, first_head=0, first_layer=0, channels=())

    @property
    def is_cut(self) -> bool:
        return bool(self.channels) or self.heads < self.all_heads or self.layers < self.all_layers

    @property
    def item_bytes(self) -> int:
        """Bytes of a number. Raises ValueError for an unknown dtype."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r} of a KV pool: one of {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one slot. Raises ValueError for an unknown dtype."""
        return self.dim * self.item_bytes

    @property
    def kept(self) -> tuple[tuple[int, int], ...]:
        """First and number of the bytes of each run of the whole model's row that a row here has, in order."""
        if not self.channels:
            return ((self.first_head * self.head_bytes, self.heads * self.head_bytes),)
        return tuple((first * self.item_bytes, count * self.item_bytes) for first, count in self.channels)

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

    @property
    def whole(self) -> KVGroup:
        """The same group with all the model's heads; how many blocks an entry takes depends on the width."""
        return msgspec.structs.replace(self, parts=tuple(part.whole for part in self.parts), blocks_per_entry=0)


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
        return tuple(
            msgspec.structs.replace(part, all_heads=whole.heads, all_dim=whole.dim, all_layers=whole.layers)
            for part, whole in ((part, part.whole) for part in self.parts or (plain,))
        )

    @property
    def block_bytes(self) -> int:
        return sum(part.block_bytes(self.block_size) for part in self.pages)

    def blocks_beside(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens needs at most at a time, besides those of its tokens."""
        blocks = -(-num_tokens // self.block_size)
        return sum(each.blocks_per_entry * min(blocks, each.most_entries or blocks) for each in self.groups)

    @property
    def whole_pages(self) -> tuple[PagePart, ...]:
        """The parts of a block with all the model's heads and layers: equal for workers of one model, whatever their ranks."""
        return tuple(part.whole for part in self.pages)

    @property
    def is_cut(self) -> bool:
        """True if the pool holds only some of the model's heads or layers."""
        return any(part.is_cut for part in chain(self.pages, *(group.parts for group in self.groups)))

    def compatible_with(self, other: KVLayout) -> bool:
        """True if blocks can move between the two pools unchanged (pool sizes may differ)."""
        return all(getattr(self, name) == getattr(other, name) for name in ("block_size", "pages", "groups"))

    def same_model(self, other: KVLayout) -> bool:
        """True if both keep the same of a model, or shares of it: workers of two widths or depths, or ranks of one."""
        if not self.is_cut and not other.is_cut:
            return self.compatible_with(other)
        ours, theirs = ((one.block_size, one.whole_pages, [each.whole for each in one.groups]) for one in (self, other))
        return ours == theirs


Places = list[list[tuple[int, int]]]


def entry_places(parts: Sequence[PagePart], block_bytes: int, block_size: int) -> Places:
    """Return for each part and layer which of an entry's blocks has it, and the first byte there; [] if one fits nowhere."""
    find = _layer_by_layer if parts[0].per_token else _first_fit
    return find(parts, block_bytes, block_size)


def _layer_by_layer(parts: Sequence[PagePart], block_bytes: int, block_size: int) -> Places:
    """Each layer with all of its parts in one block: a pass has a block table for each of them.

    All layers keep every part, so they are of one size.
    """
    sizes = [_aligned(part.block_bytes(block_size) // max(1, part.layers)) for part in parts]
    num_layers, in_block = parts[0].layers, block_bytes // max(1, sum(sizes))
    assert all(part.layers == num_layers for part in parts), "a layer keeps every part"
    if not in_block:
        return []
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        [(layer // in_block, layer % in_block * sum(sizes) + first) for layer in range(num_layers)] for first in firsts
    ]


def _aligned(size: int) -> int:
    return -(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT


def _first_fit(parts: Sequence[PagePart], block_bytes: int, block_size: int) -> Places:
    """The first block with room takes a layer's part, so the same parts lie alike everywhere."""
    used, places = list[int](), Places()
    for part in parts:
        size = _aligned(part.block_bytes(block_size) // max(1, part.layers))
        if size > block_bytes:
            return []
        places.append([])
        for _ in range(part.layers):
            number = next((at for at, bytes_ in enumerate(used) if bytes_ + size <= block_bytes), len(used))
            if number == len(used):
                used.append(0)
            places[-1].append((number, used[number]))
            used[number] += size
    return places
