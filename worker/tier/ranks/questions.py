"""Questions of the first rank to the others about their shares below the pool.

The first rank decides what is stored, loaded, written and read, and by which slots; the others do the same when they are asked.
It is done by all or counts for none: digests add up, and of files those count that all ranks have.
"""

from __future__ import annotations

import msgspec


class Room(msgspec.Struct, frozen=True, array_like=True):
    """The slots that there are, by the same numbers on all ranks."""

    num_slots: int
    region: str = ""  # the first rank's, whose workers share memory; empty: each has its own


class Store(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Copy blocks into slots. The answer: the blocks' digests."""

    room: Room
    slots: list[int]
    blocks: list[int]


class Load(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Copy slots into blocks. The answer: the blocks' digests."""

    room: Room
    slots: list[int]
    blocks: list[int]


class TakeFolder(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Claim this rank's folder beside the first one's. The answer: the files in it, `list[File]`."""

    folder: str  # the first rank's


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file, by its block and the groups in it."""

    digest: bytes
    numbers: list[int]


class Entries(msgspec.Struct, frozen=True, array_like=True):
    """A block of tokens: slots by group."""

    digest: bytes
    slots: dict[int, list[int]]


class Write(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Remove files, then write others. The answer: how many were written."""

    room: Room
    gone: list[File]
    files: list[Entries]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Read files into slots, up to the first that is not what was written. The answer: how many were read."""

    room: Room
    files: list[Entries]


Question = Store | Load | TakeFolder | Write | Read
QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
