"""The messages between the first rank of a worker and the others, about KV alone.

    leader                                         follower
      ── head (40 bytes), payload ─────────────────────▶
      ◀────────────────────────── answer (16 bytes), payload ──

A payload is words (u32) or JSON, 64 KiB at most, so that any channel with slots can carry a message. Every call is answered;
a follower may answer later calls first. `PUSH` has, for each block, the group and its number in the receiver's entry, the
receiver's block, and the blocks of our own entry, as many as the layout says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np

from kvtransfer.plan import Item
from kvtransfer.shares import Move

HEAD = struct.Struct("<IIHHIQQ8x")  # bytes behind, call, kind, peer, milliseconds, lease, generation
ANSWER = struct.Struct("<IIB7x")  # bytes behind, call, 1 if it went well
MAX_PAYLOAD = 64 << 10


class Call(IntEnum):
    """A leader's question, and its answer if that is not empty."""

    OPEN = 1  # share the pool (lease: incarnation): the region, JSON
    RANKS = 2  # all ranks' layouts, JSON
    CONNECT = 3  # open links to a peer's region, JSON: bytes/s, an f64
    PUSH = 4  # digests, a u64 a block
    EXPECT = 5
    ARRIVED = 6  # a byte: 1 if all did
    FORGET = 7
    DIGESTS = 8  # a u64 for each block of our pool
    BELOW = 9  # the answer about tiers below the pool


def words_of(moves: Sequence[Move]) -> list[int]:
    """The words of a push."""
    words: list[int] = []
    for move in moves:
        words += (move.item.group << 24 | move.item.number, move.block, *move.entry)
    return words


def moves_in(words: Sequence[int], blocks_per_entry: Sequence[int]) -> list[Move]:
    """The moves of a push's words. Raises ValueError for words that make none."""
    moves, at = [], 0
    while at < len(words):
        group, number = words[at] >> 24, words[at] & 0xFFFFFF
        if group >= len(blocks_per_entry) or at + 2 + blocks_per_entry[group] > len(words):
            raise ValueError("the words of a push are cut off")
        end = at + 2 + blocks_per_entry[group]
        moves.append(Move(Item(group, 0, number), words[at + 1], tuple(words[at + 2 : end])))
        at = end
    return moves


def in_messages(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Split a push into messages."""
    part, room = list[Move](), MAX_PAYLOAD // 4
    for move in moves:
        if part and room < 2 + len(move.entry):
            yield part
            part, room = [], MAX_PAYLOAD // 4
        part.append(move)
        room -= 2 + len(move.entry)
    if part:
        yield part


def packed_words(words: Sequence[int]) -> bytes:
    """Pack u32s, little-endian."""
    return np.asarray(words, "<u4").tobytes()


def unpacked_words(payload: bytes) -> list[int]:
    """Raises ValueError."""
    return np.frombuffer(payload, "<u4").tolist()
