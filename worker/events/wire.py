"""The wire form of KV events, which vLLM made and routers read. A batch is a msgpack array, an event of it a map.

Fields are vLLM's, and its defaults are left out where it leaves them out. Readers hash the tokens themselves, so a block's hash
is only a name: the low 64 bits of its digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import msgspec

from common.blocks import unpack_tokens

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_encoder = msgspec.msgpack.Encoder()


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type", omit_defaults=True):
    """A run of blocks, each behind the one before, that came to a tier."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: they begin a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None  # one a block


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    """Blocks that left a tier."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    """All blocks of this publisher left all tiers."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    """Events in their order."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int

    def encoded(self) -> bytes:
        return _encoder.encode(self)


@dataclass(frozen=True, slots=True)
class Block:
    """A block's place in its chain, and its tokens."""

    digest: bytes
    parent: bytes | None
    tokens: bytes  # packed
    extra: str = ""  # root of a first block, unless it is the plain one


@dataclass(frozen=True, slots=True)
class Change:
    """A block that came to a tier, or left it. Without a block: all left."""

    medium: str
    block: Block | None
    is_here: bool


CLEARED = Change("", None, False)


def events_of(changes: Iterable[Change], block_size: int) -> list[Event]:
    """The events of these changes: a run of like ones is one event."""
    return [_event(run, block_size) for run in _runs(changes)]


def _runs(changes: Iterable[Change]) -> list[list[Change]]:
    runs = list[list[Change]]()
    for change in changes:
        if runs and _goes_on(runs[-1][-1], change):
            runs[-1].append(change)
        else:
            runs.append([change])
    return runs


def _goes_on(before: Change, change: Change) -> bool:
    if (
        before.block is None
        or change.block is None
        or (before.medium, before.is_here) != (change.medium, change.is_here)
    ):
        return False
    return not change.is_here or change.block.parent == before.block.digest


def _event(run: list[Change], block_size: int) -> Event:
    first, blocks = run[0], [change.block for change in run if change.block is not None]
    if not blocks:
        return AllBlocksCleared()
    hashes = [_hash(block.digest) for block in blocks]
    if not first.is_here:
        return BlockRemoved(hashes, first.medium)
    extra = [[block.extra] if block.extra else None for block in blocks]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if blocks[0].parent is None else _hash(blocks[0].parent),
        token_ids=[*chain(*(unpack_tokens(block.tokens) for block in blocks))],
        block_size=block_size,
        lora_id=None,
        medium=first.medium,
        lora_name=None,
        extra_keys=extra if any(extra) else None,
    )


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
