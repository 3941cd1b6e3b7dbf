"""One host's shared memory as another host's processes write it: what is new here, and what is new there.

Every word has one writer. So whatever a process of this host wrote is sent in the order in which it was written, and arrives
where a process of the other host looks for it: each host has the same memory, some microseconds apart. A ring's slot is
free where it is read once that is known where it is written, so no more than a ring's slots are ever on their way.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from typing import NamedTuple

from engine.parallel.layout import (
    AFTER_A_LOSS,
    BEATS,
    DISMISSED,
    GROUP_SLOT_BYTES,
    KIND,
    LEFT,
    LINE,
    NUMBER,
    PIECE,
    READ,
    SLOT_BYTES,
    SLOTS,
    WELL,
    WRITTEN,
    line_of,
    missed_from,
    num_bytes,
    ring_from,
    ring_slots_from,
    slots_from,
)

HEAD = struct.Struct("<BxHIQ")  # kind, process, bytes that follow, number of an operation or a slot
MOST_WORDS_BYTES = 1024  # a process's last words
_SLOT_HEAD = 8 * (PIECE + 1)
_WORD = 1 << 32  # devices count in 32 bits
_GIVEN_UP = 1 << 31

Fill = Callable[[memoryview], None]  # reads so many bytes that follow a head


class StrayFrameError(ConnectionError):
    """The other end sent what no end of this release sends."""


class Kind(IntEnum):
    """The kinds of frames, by what they tell."""

    BEATS = 1  # the signs of life of all processes of the sender's side
    POSTED = 2  # a process's part of an operation of all: its kind, its bytes
    WRITTEN = 3  # a slot of a process's ring: its head, its piece
    READ = 4  # slots of a process's ring are free again
    LEFT = 5  # this process computes no more
    DISMISSED = 6  # the leader ends all
    SAID = 7  # the last words about a process
    MISSED = 8  # a device waited in vain for ranks of its stage


class Frame(NamedTuple):
    """A head, and what follows."""

    head: bytes
    parts: tuple[bytes | memoryview, ...] = ()


def frame(kind: Kind, index: int, number: int, *parts: bytes | memoryview) -> Frame:
    """Return a frame with these parts."""
    return Frame(HEAD.pack(kind, index, sum(map(len, parts)), number), parts)


class Mirror:
    """One end: what this side's processes write goes there, and what the other's do comes here. One thread in each direction."""

    def __init__(self, memory: mmap.mmap, size: int, *, theirs: Collection[int], width: int = 1) -> None:
        """`theirs`: the numbers of the processes on the other side; all others are on ours. `width`: as of a group's stages."""
        view = memoryview(memory)[: num_bytes(size)]
        self._size, self._theirs = size, [*theirs]
        self._ours = [rank for rank in range(size) if rank not in theirs]
        self._words = view[: slots_from(size)].cast("q")
        begin, room = slots_from(size), GROUP_SLOT_BYTES
        self._slots = [view[begin + slot * room : begin + (slot + 1) * room] for slot in range(2 * size)]
        to = {rank: (rank + width) % size for rank in range(size)}
        rings = {rank: _Ring(view, ring_from(size, rank)) for rank in range(size)}
        self._out = {rank: rings[rank] for rank in self._ours if to[rank] in theirs}
        self._in = {rank: rings[rank] for rank in theirs if to[rank] not in theirs}
        self._posted = dict.fromkeys(range(size), 0)
        self._missed = view[missed_from(size) :]
        self._seen_missed = bytes(self._missed)
        self._told = set[Kind]()
        self._fence = threading.Lock()
        # The processes that frames of a kind may be about, and how many bytes may follow.
        self._bounds: dict[int, tuple[Collection[int], range]] = {
            Kind.BEATS: ((0,), _from_to(8 * len(theirs))),
            Kind.POSTED: (theirs, _from_to(8, 8 + GROUP_SLOT_BYTES)),
            Kind.WRITTEN: (self._in.keys(), _from_to(_SLOT_HEAD, _SLOT_HEAD + SLOT_BYTES)),
            Kind.READ: (self._out.keys(), _from_to(0)),
            Kind.LEFT: ((0,), _from_to(0)),
            Kind.DISMISSED: ((0,), _from_to(0)),
            Kind.SAID: (theirs, _from_to(0, MOST_WORDS_BYTES)),
            Kind.MISSED: (theirs, _from_to(LINE)),
        }
        self._takes: dict[int, Callable[[int, int, int, Fill], None]] = {
            Kind.BEATS: self._take_beats,
            Kind.POSTED: self._take_part,
            Kind.WRITTEN: self._take_slot,
            Kind.READ: self._take_read,
            Kind.LEFT: self._take_left,
            Kind.DISMISSED: self._take_dismissed,
            Kind.MISSED: self._take_missed,
        }

    def news(self) -> Iterator[Frame]:
        """Yield what is new on our side since the last call. Each is to be sent before the next is asked for."""
        yield from self._news_of_missed()
        for rank in self._ours:
            last = self._words[line_of(rank) + NUMBER]
            with self._fence:  # nothing is read before the number was
                pass
            while self._posted[rank] < last:
                self._posted[rank] += 1
                yield self._part_of(rank, self._posted[rank])
        for rank, ring in self._out.items():
            for number in ring.written():
                yield from self._news_of_missed()  # before the rows that lack it
                yield frame(Kind.WRITTEN, rank, number, *ring.slot(number))
        for rank, ring in self._in.items():
            if freed := ring.freed():
                yield frame(Kind.READ, rank, freed)
        for kind, word in ((Kind.DISMISSED, DISMISSED), (Kind.LEFT, LEFT)):
            if kind not in self._told and (number := self._words[line_of(self._size) + word]):
                self._told.add(kind)
                yield frame(kind, 0, number)

    def _news_of_missed(self) -> Iterator[Frame]:
        """The lines, on our side, of what a device missed."""
        if self._missed == self._seen_missed:
            return
        before, self._seen_missed = self._seen_missed, bytes(self._missed)
        for rank in self._ours:
            line = slice(rank * LINE, (rank + 1) * LINE)
            if self._seen_missed[line] != before[line]:
                yield frame(Kind.MISSED, rank, 0, self._seen_missed[line])

    def beats(self) -> Frame:
        """The signs of life of our side."""
        counts = [self._words[line_of(rank) + BEATS] for rank in self._ours]
        return frame(Kind.BEATS, 0, 0, struct.pack(f"<{len(counts)}q", *counts))

    def _part_of(self, rank: int, number: int) -> Frame:
        kind = self._words[line_of(rank) + KIND + number % 2]
        part = self._slots[number % 2 * self._size + rank][: min(kind >> 8, GROUP_SLOT_BYTES)]
        return frame(Kind.POSTED, rank, number, struct.pack("<q", kind), part)

    def take(self, head: bytes, fill: Fill) -> tuple[int, str] | None:
        """Write what a frame tells; return a process and last words about it, if it has some.

        Raises StrayFrameError before it reads on, and what `fill` raises.
        """
        kind, index, count, number = HEAD.unpack(head)
        about, counts = self._bounds.get(kind, ((), range(0)))
        if index not in about or count not in counts:
            raise _stray(kind, index, count, number)
        if kind == Kind.SAID:
            return index, _read(count, fill).decode(errors="replace")
        self._takes[kind](index, count, number, fill)
        return None

    def _take_beats(self, index: int, count: int, number: int, fill: Fill) -> None:
        found = struct.unpack(f"<{len(self._theirs)}q", _read(count, fill))
        for rank, beats in zip(self._theirs, found, strict=True):
            self._words[line_of(rank) + BEATS] = beats

    def _take_slot(self, index: int, count: int, number: int, fill: Fill) -> None:
        self._in[index].take(number, count - _SLOT_HEAD, fill)

    def _take_read(self, index: int, count: int, number: int, fill: Fill) -> None:
        self._out[index].free(number)

    def _take_left(self, index: int, count: int, number: int, fill: Fill) -> None:
        if not 0 < number <= self._size:
            raise _stray(Kind.LEFT, index, count, number)
        self._told.add(Kind.LEFT)
        self._words[line_of(self._size) + LEFT] = number

    def _take_dismissed(self, index: int, count: int, number: int, fill: Fill) -> None:
        if number not in (WELL, AFTER_A_LOSS):
            raise _stray(Kind.DISMISSED, index, count, number)
        self._told.add(Kind.DISMISSED)
        self._words[line_of(self._size) + DISMISSED] = number

    def _take_missed(self, index: int, count: int, number: int, fill: Fill) -> None:
        self._missed[index * LINE : (index + 1) * LINE] = _read(count, fill)

    def _take_part(self, rank: int, count: int, number: int, fill: Fill) -> None:
        (kind,) = struct.unpack("<q", _read(8, fill))
        if number != self._posted[rank] + 1 or kind >> 8 != count - 8:
            raise _stray(Kind.POSTED, rank, count, number)
        fill(self._slots[number % 2 * self._size + rank][: count - 8])
        self._posted[rank] = number
        self._words[line_of(rank) + KIND + number % 2] = kind
        with self._fence:  # the part is written before the number is
            self._words[line_of(rank) + NUMBER] = number

    def leave(self) -> None:
        """Tell the processes here that no more comes from there; without the leader, also that it is over."""
        words, line = self._words, line_of(self._size)
        words[line + DISMISSED] = words[line + DISMISSED] or (AFTER_A_LOSS if 0 in self._theirs else 0)
        words[line + LEFT] = words[line + LEFT] or self._theirs[0] + 1

    @property
    def dismissed(self) -> int:
        """WELL or AFTER_A_LOSS once the leader ends all."""
        return self._words[line_of(self._size) + DISMISSED]


class _Ring:
    """A ring that one side writes and the other one reads."""

    def __init__(self, view: memoryview, start: int) -> None:
        self._words = view[start : start + 2 * LINE].cast("q")
        begins = ring_slots_from(start)
        self._heads = [view[begin - LINE : begin - LINE + _SLOT_HEAD] for begin in begins]
        self._pieces = [head.cast("q") for head in self._heads]
        self._slots = [view[begin : begin + SLOT_BYTES] for begin in begins]
        self._written = self._read = 0
        self._fence = threading.Lock()

    def written(self) -> Iterator[int]:
        """The numbers of slots that were written since."""
        for _ in range(self._ahead(WRITTEN, self._written)):
            self._written += 1
            yield self._written

    def _ahead(self, word: int, known: int) -> int:
        """Return how many slots a word is ahead of what is known; 0 for one put far ahead, as a device's process gives up."""
        ahead = (self._words[word] - known) % _WORD
        with self._fence:  # nothing is read before the word was
            return ahead if ahead <= SLOTS else 0

    def slot(self, number: int) -> tuple[memoryview, memoryview]:
        """The head and the piece of the slot with this number, from 1."""
        at = (number - 1) % SLOTS
        return self._heads[at], self._slots[at][: min(self._pieces[at][PIECE] % _WORD, SLOT_BYTES)]

    def freed(self) -> int:
        """Return how many slots were read since it began; 0 if it is known."""
        ahead = self._ahead(READ, self._read)
        self._read += ahead
        return self._read if ahead else 0

    def take(self, number: int, count: int, fill: Fill) -> None:
        """Write the next slot."""
        taken = (number - self._words[READ]) % _WORD
        if number != self._written + 1 or (not 0 < taken <= SLOTS and taken < _GIVEN_UP):
            raise _stray(Kind.WRITTEN, 0, count, number)
        at = (number - 1) % SLOTS
        fill(self._heads[at])
        if self._pieces[at][PIECE] % _WORD != count:
            raise _stray(Kind.WRITTEN, 0, count, number)
        fill(self._slots[at][:count])
        self._set(WRITTEN, self._written, number)
        self._written = number

    def free(self, number: int) -> None:
        """Let the writer have slots again."""
        if not self._read < number <= self._written:
            raise _stray(Kind.READ, 0, 0, number)
        self._set(READ, self._read, number)
        self._read = number

    def _set(self, word: int, before: int, number: int) -> None:
        """Set a word, after what it tells of; one that a process put far ahead stays there, so that its device goes on."""
        with self._fence:
            if (self._words[word] - before) % _WORD == 0:
                self._words[word] = number


def _from_to(least: int, most: int | None = None) -> range:
    return range(least, (least if most is None else most) + 1)


def _read(count: int, fill: Fill) -> bytes:
    found = bytearray(count)
    fill(memoryview(found))
    return bytes(found)


def _stray(kind: int, index: int, count: int, number: int) -> StrayFrameError:
    return StrayFrameError(
        f"a frame of kind {kind} about {index}, of {count} bytes, with number {number} can't come now:"
        " run the same release everywhere"
    )
