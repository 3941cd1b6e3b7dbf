"""State updates of a pass, and the column layout of a layer's projection.

A token reads the state that the token before it left, and writes its own one's place. That is the same place but at a
checkpoint, which never changes again. A state has several blocks, so each layer has its block of each state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.arrays import Integers, Ints, Longs

TILE_ROWS = 64  # tokens of a prompt computed at once
# Values in place of a state's block id: no state, or the preceding tile's or row's.
NOTHING, CARRIED = -1, -2


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Decoding rows (one new token each) first, then prompts or parts of them. For layers in one of a state's blocks.

    A drafted token's row reads what the row before it wrote (`CARRIED`), and writes a block of its own, so that the sequence
    can go on behind any of them.
    """

    moves: torch.Tensor  # [S, 2] int32: the block read and the one written; -1: none
    tiles: torch.Tensor  # [I, 8] int32, columns as in `deal_out_states`
    runs: torch.Tensor  # [P, 2] int32: each prompt's first tile and number of tiles

    @property
    def num_decode(self) -> int:
        return len(self.moves)

    def steps(self) -> list[list[tuple[int, int, int]]]:
        """The decoding rows with the blocks that each reads and writes, in rounds: a row reads what an earlier round wrote."""
        rounds, depth, before = list[list[tuple[int, int, int]]](), 0, NOTHING
        for row, (source, target) in enumerate(self.moves.tolist()):
            if target < 0:
                continue
            depth = depth + 1 if source == CARRIED else 0
            if depth == len(rounds):
                rounds.append([])
            rounds[depth].append((row, before if source == CARRIED else source, target))
            before = target
        return rounds


@dataclass(frozen=True, slots=True)
class KeptState:
    """One layer's array of each state."""

    number: int  # its block within the state
    kept: torch.Tensor  # [num_blocks, planes, 1, heads, dim], a strided view of the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of each key head's group in a row of the projection."""

    first: int
    step: int  # stride between groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of columns: `groups` times `width`."""

    columns: Columns
    groups: int
    width: int

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers [T, groups, width] in rows x [T, N]."""
        shape, strides = (len(x), self.groups, self.width), (x.stride(0), self.columns.step, 1)
        return x.as_strided(shape, strides, x.storage_offset() + self.columns.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The inputs of a convolution: one to three adjacent spans of columns."""

    spans: tuple[Span, ...]
    taps: int  # inputs read: the token's own and those before it
    has_silu: bool = True  # after the sum
    # First columns of the gates on the inputs, and of the gates on the outputs.
    gates: tuple[int, int] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(span.groups * span.width for span in self.spans)

    @property
    def count(self) -> int:
        return sum(self.sizes)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The inputs [T, C] in rows x [T, N]."""
        parts = [span.view(x).flatten(1) for span in self.spans]
        inputs = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return inputs if self.gates is None else inputs * self._gate(x, self.gates[0])

    def gated(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gated outputs [T, C]."""
        return out if self.gates is None else out * self._gate(x, self.gates[1])

    def _gate(self, x: torch.Tensor, first: int) -> torch.Tensor:
        return x[:, first : first + self.count]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeads:
    """The heads of a layer. `ratio` value heads share a key head, and form a group with it."""

    num_key_heads: int
    ratio: int
    key_dim: int  # numbers of a head
    value_dim: int
    taps: int  # inputs of the convolution: the token's own and those before it
    q: Columns
    k: Columns
    v: Columns
    z: Columns  # the output's gate
    b: Columns
    a: Columns
    most_strength: float = 1.0  # factor of the sigmoid of b

    @property
    def num_value_heads(self) -> int:
        return self.num_key_heads * self.ratio

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> Channels:
        """The convolution's channels: queries, keys and values in sequence."""
        parts = ((self.q, self.key_dim), (self.k, self.key_dim), (self.v, self.ratio * self.value_dim))
        spans = tuple(Span(columns=columns, groups=self.num_key_heads, width=width) for columns, width in parts)
        return Channels(spans=spans, taps=self.taps)

    def view(self, x: torch.Tensor, columns: Columns, width: int) -> torch.Tensor:
        """The numbers [T, groups, width] in rows x [T, N]."""
        return Span(columns=columns, groups=self.num_key_heads, width=width).view(x)


def deal_out_states(
    starts: Longs, ends: Longs, rows: Longs, tables: Ints, *, block_size: int
) -> tuple[Integers, Integers]:
    """Split prompts, positions [start, end) from row `rows` on, into tiles that end where the state's block changes.

    Returns tiles and runs.

    `tables` [P, blocks] has the place of the state for each block of tokens; blocks with one place change it one after another.
    A tile's columns: first row, rows, place whose state it begins with (`NOTHING`, `CARRIED`), place that keeps the state
    behind it (`NOTHING`: the next tile carries it on); first row of its prompt, and the place of the state before that.
    """
    tiles, runs = list[tuple[int, ...]](), list[tuple[int, int]]()
    for index, (start, end, row) in enumerate(zip(starts.tolist(), ends.tolist(), rows.tolist(), strict=True)):
        table: list[int] = tables[index].tolist()
        before = table[(start - 1) // block_size] if start else NOTHING
        first, source = len(tiles), before
        for at, count, is_last in _cuts(start, end, table, block_size):
            target = table[at // block_size] if is_last else NOTHING
            tiles.append((row + at - start, count, source, target, row, before, 0, 0))
            source = CARRIED
        runs.append((first, len(tiles) - first))
    return np.array(tiles, dtype=np.int32).reshape(-1, 8), np.array(runs, dtype=np.int32).reshape(-1, 2)


def max_tiles(num_tokens: int, num_prompts: int, block_size: int) -> int:
    """Upper bound of the tiles that `deal_out_states` makes of prompts with so many tokens."""
    return num_tokens // TILE_ROWS + num_tokens // block_size + 2 * num_prompts


def _cuts(start: int, end: int, table: list[int], block_size: int) -> Iterator[tuple[int, int, bool]]:
    """Tiles from `start` on: first position, number of tokens, and True if the next token's state is in another block."""
    while start < end:
        place, block = table[start // block_size], start // block_size + 1
        while block * block_size < min(end, start + TILE_ROWS) and table[block] == place:
            block += 1
        stop = min(end, start + TILE_ROWS, block * block_size)
        moves = stop == end or (stop % block_size == 0 and table[stop // block_size] != place)
        yield start, stop - start, moves
        start = stop
