"""Shares: what tenants with a `kv_share` hold of a tier, and what of it goes first. No files, no threads.

Who has more than its share gives first; and who would have more with what it stores takes from nobody else. So where shares add
up to a tier at most, and everyone has one, nobody's blocks go for others' while it has less than its share.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.messages import Keep

NOBODY = 0  # no owner's key


class Owner(NamedTuple):
    """A tenant that is charged with a block, and the part of a tier that its blocks may fill."""

    key: int  # the same in all processes
    share: float  # below 1

    @classmethod
    def of(cls, keep: Keep | None) -> Owner | None:
        return None if keep is None else cls(_key_of(keep.tenant), keep.share)


@lru_cache(maxsize=1_024)
def _key_of(tenant: str) -> int:
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little") or 1


# -- blocks of one process --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """A tenant's blocks with their sizes, the one used longest ago first, and how much they may be."""

    most: float
    blocks: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    size: int = 0  # with what is on its way


class Shares:
    """Sizes by tenant, in the unit of the tier's `capacity`. As in the pool, what has no owner is nobody's surplus."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tenants: dict[int, _Held] = {}
        self._over: dict[int, _Held] = {}

    def charge(self, owner: Owner | None, size: int) -> None:
        """Charge an owner with what is on its way, or with so much less."""
        if owner is not None:
            held = self._tenants.setdefault(owner.key, _Held(0.0))
            held.most = owner.share * self._capacity  # it may have changed
            held.size += size
            self._judge(owner.key, held)

    def add(self, owner: Owner | None, digest: bytes, size: int) -> None:
        """Charge an owner with a block, or with more of it."""
        if owner is not None:
            self.charge(owner, size)
            blocks = self._tenants[owner.key].blocks
            blocks[digest] = blocks.get(digest, 0) + size

    def touch(self, owner: Owner | None, digest: bytes) -> None:
        """Record a use."""
        if owner is not None:
            self._tenants[owner.key].blocks.move_to_end(digest)

    def remove(self, owner: Owner | None, digest: bytes) -> None:
        if owner is not None:
            held = self._tenants[owner.key]
            held.size -= held.blocks.pop(digest)
            self._judge(owner.key, held)

    def _judge(self, key: int, held: _Held) -> None:
        if held.size > held.most:
            self._over[key] = held
        else:
            self._over.pop(key, None)
        if not held.size:
            del self._tenants[key]

    def is_over(self, owner: Owner | None) -> bool:
        return owner is not None and owner.key in self._over

    def surplus(self) -> Iterator[bytes]:
        """The blocks of tenants beyond their shares, in the order in which they go."""
        for held in self._over.values():
            yield from held.blocks


# -- slots of several -------------------------------------------------------------------------------------------------


def surplus_of_slots(
    owner: NDArray[np.uint64],
    share: NDArray[np.float64],
    used: NDArray[np.uint64],
    may_go: NDArray[np.bool_],
    wanted: Mapping[Owner, int],
) -> tuple[NDArray[np.intp], dict[int, int]]:
    """The slots beyond shares if owners get so many `wanted` ones more, the one used longest ago first, and what they can't have.

    Each slot has its owner's key and share, and the time of its last use. What an owner can't have, by its key, is what its
    slots that `may_go` don't make up for.
    """
    owned = np.flatnonzero(owner)
    ordered = owned[np.lexsort((used[owned], owner[owned]))]
    keys, firsts, counts = np.unique(owner[ordered], return_index=True, return_counts=True)
    held = {int(key): ordered[at : at + count] for key, at, count in zip(keys, firsts, counts, strict=True)}
    # A share may have changed: that of the last use holds. A flipped bit makes any number of it.
    sane = np.clip(np.nan_to_num(share, nan=1.0), 0.0, 1.0)
    shares = {key: float(sane[slots[-1]]) for key, slots in held.items()} | dict(wanted.keys())
    more = {each.key: count for each, count in wanted.items()}
    going, unmet = [ordered[:0]], dict[int, int]()
    for key, most in shares.items():
        slots = held.get(key, ordered[:0])
        excess = len(slots) + more.get(key, 0) - int(most * len(owner))
        if excess > 0:
            going.append(slots[may_go[slots]][:excess])
            if lacking := min(excess - len(going[-1]), more.get(key, 0)):
                unmet[key] = lacking
    slots = np.concatenate(going)
    return slots[np.argsort(used[slots], kind="stable")], unmet
