"""A pass as a message: a run of int32 words, and a header that determines every offset in it.

`FIELDS` alone lists what a pass consists of; packing, views and captured graphs follow from it. Every field is int32, so that
one copy brings all of them to the device, and begins at a multiple of 16 bytes.

T tokens, decoding ones first; S sequences; R sampled rows; I items or tiles of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch

from engine.arrays import Integers, Ints
from engine.kernels.attention import HeadShape

Count = Annotated[int, msgspec.Meta(ge=0)]

ALIGNMENT = 4  # words: kernels are compiled for fields at 16-byte boundaries
MAX_GRAPH_PROMPTS = 4  # prompts beside decoding in a captured graph


class GraphSize(msgspec.Struct, frozen=True):
    """The capacity of a captured pass: `decoding` tokens, then `prompts` tokens of prompts.

    Without decoding tokens, the room is for one whole prompt.
    """

    decoding: Count
    prompts: Count = 0

    @property
    def tokens(self) -> int:
        return self.decoding + self.prompts

    @property
    def num_prompts(self) -> int:
        return 0 if not self.prompts else MAX_GRAPH_PROMPTS if self.decoding else 1

    @property
    def num_sampled(self) -> int:
        return self.decoding + self.num_prompts


class SinglesSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences with one query each: decoding ones, or (in the last layer) sampled ones."""

    places: Count = 0  # capacity for sequences
    items: Count = 0  # attention items for each window
    sequences: Count = 0  # rows of the block table
    width: Count = 0  # blocks in a row of the block table
    longest: Count = 0  # positions of the longest context


class MadeSize(msgspec.Struct, frozen=True, kw_only=True):
    """Up-projected prompts at a pass's end, by the number of tokens and sequences before them."""

    prompts: Count
    rows: Count
    tiles: Count
    blocks: Count  # contexts'
    tile_rows: Count  # queries in each of their tiles


class HeadsSize(msgspec.Struct, frozen=True, kw_only=True):
    """Attention with one shape of heads."""

    heads: HeadShape
    windows: tuple[int, ...]  # distinct windows of its layers
    item_queries: Count = 1  # most queries of one sequence in a decode item
    tile_rows: Count = 0  # prompt queries in a tile
    tiles_at_once: Count = 0  # the limit by which tiles were split
    made: MadeSize | None = None


class PromptsSize(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts, or parts of them. In a captured graph the tiles are complete, and no sequence is listed."""

    sequences: Count = 0  # listed sequences
    width: Count = 0  # blocks in a row of their block table
    blocks: Count = 0  # blocks of contexts; 0: all tokens are new
    tiles: Count  # one count a shape of heads
    max_query_len: Count
    max_context_len: Count


class StatesSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a pass's state updates, for models with recurrent states."""

    moves: Count  # slots for decoding sequences
    tiles: Count = 0  # tiles of prompts
    runs: Count = 0  # prompts
    blocks: Count = 1  # each block of a state has its copy of moves and tiles


class PassSize(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a pass: the sizes of all its parts."""

    graph: GraphSize | None = None  # the captured graph that computes it
    tokens: Count
    num_sampled: Count  # sequences that need logits
    sampled_rows: Count  # entries in `sampled_rows`
    attention: tuple[HeadsSize, ...]
    last_window: int = 0
    decode: SinglesSize
    prompts: PromptsSize | None = None
    states: StatesSize | None = None
    final: SinglesSize = SinglesSize()  # the sampled rows, where the pass has prompts
    more_tables: Count = 0  # further copies of slots and block tables


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a pass, or several of one shape."""

    name: str
    shape: Callable[[PassSize], tuple[int, ...]]
    empty: int = 0  # the value of unused entries
    copies: Callable[[PassSize], int] = lambda size: 1


def _prompts(shape: Callable[[PromptsSize], tuple[int, ...]]) -> Callable[[PassSize], tuple[int, ...]]:
    return lambda size: (0,) if size.prompts is None else shape(size.prompts)


def _states(shape: Callable[[StatesSize], tuple[int, ...]]) -> Callable[[PassSize], tuple[int, ...]]:
    return lambda size: (0,) if size.states is None else shape(size.states)


def _state_copies(size: PassSize) -> int:
    return 1 if size.states is None else size.states.blocks


def _tables(size: PassSize) -> int:
    return 1 + size.more_tables


def item_copies(windows: SequenceOf[tuple[int, ...]], more_tables: int) -> list[tuple[int, int, int]]:
    """For each copy of decoding sequences' items: the number of its heads, its window, and the copy of tables it reads.

    `windows` are those of each shape of heads.
    """
    return [
        (number, window, table)
        for number, own in enumerate(windows)
        for window in own
        for table in (range(1, more_tables + 1) if window and more_tables else range(1))
    ]


def _items(size: PassSize) -> int:
    return len(item_copies([shape.windows for shape in size.attention], size.more_tables))


# The block tables of single queries come last: a captured graph does not know their width.
FIELDS = (
    Field("token_ids", lambda size: (size.tokens,)),
    Field("sources", lambda size: (size.tokens,), empty=-1),
    Field("positions", lambda size: (size.tokens,)),
    Field("slots", lambda size: (size.tokens,), empty=-1, copies=_tables),
    Field("sampled_rows", lambda size: (size.sampled_rows,)),
    Field("query_start", _prompts(lambda size: (size.sequences + 1 if size.sequences else 0,))),
    Field("context_blocks", _prompts(lambda size: (size.blocks, 2)), empty=-1, copies=_tables),
    Field("tiles", _prompts(lambda size: (size.tiles, 8)), copies=lambda size: len(size.attention)),
    Field("state_moves", _states(lambda size: (size.moves, 2)), empty=-1, copies=_state_copies),
    Field("state_tiles", _states(lambda size: (size.tiles, 8)), copies=_state_copies),
    Field("state_runs", _states(lambda size: (size.runs, 2))),
    Field("context_len", _prompts(lambda size: (size.sequences,))),
    Field("prompt_tables", _prompts(lambda size: (size.sequences, size.width)), copies=_tables),
    Field("decode_items", lambda size: (size.decode.items, 8), empty=-1, copies=_items),
    Field("decode_parts", lambda size: (size.decode.places, 2), copies=_items),
    Field("decode_ends", lambda size: (size.decode.places,)),
    Field("final_items", lambda size: (size.final.items, 8), empty=-1),
    Field("final_parts", lambda size: (size.final.places, 2)),
    Field("final_ends", lambda size: (size.final.places,)),
    Field("decode_tables", lambda size: (size.decode.sequences, size.decode.width), copies=_tables),
    Field("final_tables", lambda size: (size.final.sequences, size.final.width)),
)


class Layout:
    """The layout of a pass's fields: first word, number of words, shape, words between copies."""

    __slots__ = ("places", "words")

    def __init__(self, size: PassSize) -> None:
        self.places: dict[str, tuple[int, int, tuple[int, ...], int]] = {}
        at = 0
        for field in FIELDS:
            shape = field.shape(size)
            count = math.prod(shape)
            step = -(-count // ALIGNMENT) * ALIGNMENT
            self.places[field.name] = (at, count, shape, step)
            at += step * field.copies(size)
        self.words = at

    def view(self, buffer: torch.Tensor, name: str, copy: int = 0) -> torch.Tensor:
        """The field's view in a buffer with the pass's words."""
        start, count, shape, step = self.places[name]
        start += copy * step
        return buffer[start : start + count].view(shape)


class _Message(msgspec.Struct, frozen=True, array_like=True):
    size: PassSize
    words: bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """Everything that a device needs for a pass, without its sequences. Any rank can execute it."""

    size: PassSize
    layout: Layout
    words: Ints

    @classmethod
    def empty(cls, size: PassSize) -> Packed:
        """An empty pass of this size, to capture a graph with."""
        layout = Layout(size)
        packed = cls(size, layout, np.zeros(layout.words, dtype=np.int32))
        for field in FIELDS:
            if field.empty:
                start, _, _, step = layout.places[field.name]
                packed.words[start : start + step * field.copies(size)] = field.empty
        return packed

    def put(self, name: str, values: Integers, *, at: int = 0, copy: int = 0) -> None:
        """Write `values` into a field, from row `at` of its first dimension; other rows stay empty."""
        start, count, shape, step = self.layout.places[name]
        start += copy * step
        self.words[start : start + count].reshape(shape)[at : at + len(values)] = values

    def put_rows(self, name: str, rows: Integers, values: Integers, *, copy: int = 0) -> None:
        """Write `values` into these rows of a field's first dimension."""
        start, count, shape, step = self.layout.places[name]
        start += copy * step
        self.words[start : start + count].reshape(shape)[rows] = values

    def put_copies(self, name: str, values: Integers) -> None:
        """Write values [copies, rows, …] into the first rows of each copy of a field."""
        start, _, _, step = self.layout.places[name]
        copies = self.words[start : start + len(values) * step].reshape(len(values), step)
        copies[:, : values[0].size] = values.reshape(len(values), -1)

    @property
    def begins_unknown(self) -> bool:
        """True if a token is one that the pass before samples."""
        start, count, _, _ = self.layout.places["sources"]
        return bool((self.words[start : start + count] >= 0).any())

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(_Message(self.size, self.words.astype("<i4", copy=False).tobytes()))

    @classmethod
    def decode(cls, data: bytes) -> Packed:
        """Decode a pass that `encode` wrote. Raises ValueError for anything else."""
        try:
            message = msgspec.msgpack.decode(data, type=_Message)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a packed pass: {error}; both ends must run the same release") from None
        layout = Layout(message.size)
        if len(message.words) != 4 * layout.words:
            raise ValueError(
                f"a packed pass with {len(message.words)} bytes of words, its header asks for {4 * layout.words}:"
                " send it whole, and run the same release at both ends"
            )
        return cls(message.size, layout, np.frombuffer(message.words, dtype="<i4"))
