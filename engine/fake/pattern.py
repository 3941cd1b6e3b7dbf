"""The fake engine's KV contents: a pattern for each token in every part of a block, and its verification.

A slot holds a running hash of the tokens up to it: pieces of the hash repeated over its lanes, each under its own mask.
N blocks, P = layers * planes, S slots, W = heads * dim lanes of 1, 2 or 4 bytes. A state's hash follows from the state before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.pages import KVLayout, PagePart
from engine.cache.pages import entry_views, part_views
from engine.groups import Entry, Table
from engine.kernels.attention import KeptWindow
from engine.kernels.delta.plan import KeptState

Lanes = npt.NDArray[np.unsignedinteger]
Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
ROOT = 0x6261746F6E_0001  # running hash before the first token
MASK = 2**64 - 1
_FIRST_WEIGHTS = 4096  # positions; longer contexts make more
_STEP = 6364136223846793005  # Knuth's multiplier for 64-bit linear congruential sequences
_GOLDEN = 0x9E3779B97F4A7C15
_GONE = 2**62  # no block: reading it fails
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class FakePart:
    """One part of the pool: `view` is [num_blocks, layers, planes, slots, heads, dim]."""

    def __init__(self, part: PagePart, view: torch.Tensor, *, index: int, block_size: int) -> None:
        self._block_size, self._num_slots = block_size, part.slots(block_size)
        self._slots = _unsigned(view)
        self._pattern = _Pattern(self._slots.shape[1] * self._slots.shape[3], view.element_size(), salt=3 * index)

    def write(self, table: Sequence[int], start: int, hashes: Words) -> None:
        """Write the slots of positions from `start` on; their running hashes are `hashes`."""
        positions = np.arange(start, start + len(hashes))
        lanes = self._pattern.lanes(hashes)
        blocks = np.asarray(table)[positions // self._block_size]
        self._slots[blocks, :, positions % self._num_slots] = lanes.reshape(
            len(positions), self._slots.shape[1], self._slots.shape[3]
        )

    def hash_at(self, table: Sequence[int], position: int) -> int:
        """The running hash in the slot of the newest position."""
        block = table[position // self._block_size]
        return self._pattern.hash_of(self._slots[block, :, position % self._num_slots].reshape(-1))

    def checksum(self, table: Sequence[int], end: int, *, start: int = 0) -> int:
        """Sum over the contents of these positions, read from the pool: any single changed lane changes it."""
        first = start // self._block_size
        blocks = table[first : -(-end // self._block_size)]
        rows = self._slots[blocks]  # [blocks, P, S, W]
        by_slot = rows.transpose(0, 2, 1, 3).reshape(len(blocks) * self._num_slots, -1)
        offset = first * self._num_slots
        return self._pattern.checksum(by_slot[start - offset : end - offset], np.arange(start, end))

    def expected(self, hashes: Words, *, start: int = 0) -> int:
        """Return the sum that positions from `start` on add to the checksum of a context with these running hashes."""
        positions = np.arange(start, len(hashes))
        return self._pattern.checksum(self._pattern.lanes(hashes[positions]), positions)


class FakeWindow:
    """One layer's contents within a sliding window of so many positions."""

    def __init__(self, kept: KeptWindow, part: PagePart, *, index: int, block_size: int) -> None:
        self._number, self._window = kept.number, part.window
        self._part = FakePart(part, kept.kept[:, None], index=index, block_size=block_size)

    def write(self, table: Table, start: int, hashes: Words, tokens: Sequence[int], *, drafted: int) -> None:
        """As `FakePart.write`."""
        self._part.write(self._table(table.entries), start, hashes)

    def checksum(self, table: Table, end: int, *, drafted: int) -> int:
        """Sum over what the last of `end` tokens sees."""
        return self._part.checksum(self._table(table.entries), end, start=max(0, end - self._window))

    def expected(self, hashes: Words) -> int:
        """The expected sum for a context with these running hashes."""
        return self._part.expected(hashes, start=max(0, len(hashes) - self._window))

    def _table(self, entries: Sequence[Entry]) -> list[int]:
        return [entry[self._number] if entry else _GONE for entry in entries]


class FakeState:
    """One layer's contents of each state: the running hash after its newest token."""

    def __init__(self, kept: KeptState, *, index: int, block_size: int) -> None:
        self._number, self._block_size = kept.number, block_size
        self._lanes = _unsigned(kept.kept[:, None]).reshape(len(kept.kept), -1)
        self._pattern = _Pattern(self._lanes.shape[1], kept.kept.element_size(), salt=3 * index)

    def write(self, table: Table, start: int, hashes: Words, tokens: Sequence[int], *, drafted: int) -> None:
        """Read the state before the chunk; leave one in each of its blocks' entries, or behind so many drafted tokens."""
        previous = ROOT if not start else self._read(table, start - 1, max(0, drafted - 1))
        hashes, end, size = running_hashes(previous, tokens), start + len(tokens), self._block_size
        for at in range(start // size, -(-end // size)):
            last = min((at + 1) * size, end) - 1
            lanes = self._pattern.lanes(hashes[last - start :][:1])[0]
            self._lanes[table.left(at, drafted)[self._number]] = lanes

    def checksum(self, table: Table, end: int, *, drafted: int) -> int:
        """Return the sum that the state after `end` tokens adds to the checksum of a context."""
        return mix(self._read(table, end - 1, drafted) + self._pattern.salt)

    def expected(self, hashes: Words) -> int:
        return mix(int(hashes[-1]) + self._pattern.salt)

    def _read(self, table: Table, position: int, drafted: int) -> int:
        """The hash; another number if any lane isn't what it says."""
        lanes = self._lanes[table.left(position // self._block_size, drafted)[self._number]]
        found = self._pattern.hash_of(lanes)
        wanted = self._pattern.lanes(np.array([found], dtype=np.uint64))[0]
        return found if np.array_equal(lanes, wanted) else mix(found)


def parts_of(pool: torch.Tensor, layout: KVLayout) -> list[FakePart]:
    """The contents of each part of a block of tokens."""
    return [
        FakePart(part, view, index=index, block_size=layout.block_size)
        for index, (part, view) in enumerate(zip(layout.pages, part_views(pool, layout), strict=True))
    ]


def further_parts_of(pool: torch.Tensor, layout: KVLayout) -> Iterator[tuple[int, FakeWindow | FakeState]]:
    """The contents of each layer in further groups, with the group's number."""
    views, index, size = iter(entry_views(pool, layout)), len(layout.pages), layout.block_size
    for number, group in enumerate(layout.groups, start=1):
        for part, layers in zip(group.parts, views, strict=False):
            for kept in layers:
                if isinstance(kept, KeptState):
                    yield number, FakeState(kept, index=index, block_size=size)
                else:
                    yield number, FakeWindow(kept, part, index=index, block_size=size)
                index += 1


class _Pattern:
    def __init__(self, num_lanes: int, itemsize: int, *, salt: int) -> None:
        self._pieces = 8 // itemsize
        if num_lanes < self._pieces:
            raise ValueError(f"a slot of {num_lanes} lanes of {itemsize} bytes can't hold a 64-bit hash")
        self._dtype = _UNSIGNED[itemsize]
        self._piece_of_lane = np.arange(num_lanes) % self._pieces
        self.salt = salt
        self._masks = _mixed(num_lanes, salt=salt + 1).astype(self._dtype)
        self._factors = _mixed(num_lanes, salt=salt + 2) | np.uint64(1)
        self._weights = _mixed(_FIRST_WEIGHTS, salt=salt + 3) | np.uint64(1)

    def lanes(self, hashes: Words) -> Lanes:
        """Return the lanes [tokens, num_lanes] for the running hashes [tokens]."""
        pieces = hashes.astype("<u8").reshape(-1, 1).view(self._dtype)
        lanes: Lanes = pieces[:, self._piece_of_lane] ^ self._masks
        return lanes

    def hash_of(self, lanes: Lanes) -> int:
        """Return the running hash in a slot's lanes [num_lanes]."""
        pieces = lanes[: self._pieces] ^ self._masks[: self._pieces]
        return int.from_bytes(pieces.astype(self._dtype).tobytes(), "little")

    def checksum(self, lanes: Lanes, positions: Positions) -> int:
        """Sum over lanes [n, num_lanes] of these ascending positions, mod 2^64."""
        if len(positions) == 0:
            return 0
        if positions[-1] >= len(self._weights):
            self._weights = _mixed(2 * int(positions[-1]) + 2, salt=self.salt + 3) | np.uint64(1)
        slots = lanes.astype(np.uint64) @ self._factors
        return int((slots * self._weights[positions]).sum(dtype=np.uint64))


def running_hashes(previous: int, token_ids: Sequence[int]) -> Words:
    """h[i] = h[i-1] * STEP + token[i] + 1 mod 2^64, with h[-1] = `previous`."""
    hashes = np.empty(len(token_ids), dtype=np.uint64)
    for index, token in enumerate(token_ids):
        previous = (previous * _STEP + token + 1) & MASK
        hashes[index] = previous
    return hashes


def mix(word: int) -> int:
    """The finaliser of splitmix64."""
    word = (word + _GOLDEN) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def _mixed(count: int, *, salt: int) -> Words:
    """`mix` of `count` words at once."""
    words = np.arange(count, dtype=np.uint64) + np.uint64(((salt << 40) + _GOLDEN) & MASK)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _unsigned(view: torch.Tensor) -> Lanes:
    """View a part of the pool as unsigned lanes [N, P, S, W]."""
    size = view.element_size()
    slots: Lanes = view.view(_SAME_SIZE[size]).flatten(1, 2).flatten(3).numpy().view(_UNSIGNED[size])
    return slots
