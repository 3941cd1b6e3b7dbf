"""The first rank's side: what further ranks have of blocks in memory and in files, asked for from threads that copy."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from engine.groups import Entry
from kvtransfer.transport import AmongRanks, TransferError, Transport
from worker.tier.host_memory import Answers
from worker.tier.kv_files import Stored
from worker.tier.ranks.questions import Entries, File, Load, Question, Read, Room, Store, TakeFolder, Write

# A message has 64 KiB. A block is two numbers of up to 5 bytes.
BLOCKS_OF_A_QUESTION = 2_048
FILES_OF_A_QUESTION = 32
T = TypeVar("T")


class Ask(Protocol):
    """Asks each further rank for the same. The result waits for the answers of all, by rank; it raises TransferError."""

    num_ranks: int

    def __call__(self, questions: Sequence[Question]) -> Answers: ...

    def close(self) -> None:
        """Let go of who waits: nothing that was asked for counts any more."""


class Asking:
    """Asks through the worker's transport, from threads that copy."""

    def __init__(self, ranks: AmongRanks, loop: asyncio.AbstractEventLoop) -> None:
        self._ranks, self._loop, self.num_ranks = ranks, loop, ranks.num_further
        self._closed: concurrent.futures.Future[None] = concurrent.futures.Future()

    @classmethod
    def of(cls, transport: Transport) -> Asking | None:
        """The way to this worker's further ranks; None without any. On the event loop."""
        if not isinstance(transport, AmongRanks) or not transport.num_further:
            return None
        return cls(transport, asyncio.get_running_loop())

    def __call__(self, questions: Sequence[Question]) -> Answers:
        asking: Coroutine[Any, Any, list[bytes]] = self._ranks.below([*map(msgspec.msgpack.encode, questions)])
        answered = asyncio.run_coroutine_threadsafe(asking, self._loop)

        def wait() -> list[bytes]:
            # At the end the loop waits for the thread that waits here.
            either: tuple[concurrent.futures.Future[Any], ...] = (answered, self._closed)
            concurrent.futures.wait(either, return_when=concurrent.futures.FIRST_COMPLETED)
            if not answered.done():
                raise TransferError("this worker leaves")
            return answered.result()

        return wait

    def close(self) -> None:
        """See `Ask.close`."""
        if not self._closed.done():
            self._closed.set_result(None)


class FurtherMemory:
    """The further ranks' shares in memory."""

    def __init__(self, ask: Ask, room: Room) -> None:
        self._ask, self._room, self.num_ranks = ask, room, ask.num_ranks

    def store(self, slots: Sequence[int], blocks: Sequence[int]) -> Answers:
        return self._copies(Store, slots, blocks)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Answers:
        return self._copies(Load, slots, blocks)

    def close(self) -> None:
        self._ask.close()

    def _copies(self, kind: type[Store | Load], slots: Sequence[int], blocks: Sequence[int]) -> Answers:
        size = BLOCKS_OF_A_QUESTION
        parts = (slice(at, at + size) for at in range(0, len(slots), size))
        return self._ask([kind(self._room, [*slots[part]], [*blocks[part]]) for part in parts])


class FurtherFiles:
    """The further ranks' shares in files."""

    def __init__(self, ask: Ask, room: Room) -> None:
        self._ask, self._room = ask, room

    def write(
        self, gone: Sequence[tuple[bytes, Stored]], digests: Sequence[bytes], slots: Sequence[Mapping[int, Entry]]
    ) -> Callable[[], int]:
        """Remove and write files; return how many all ranks wrote."""
        removals = [File(digest, [*stored.numbers]) for digest, stored in gone]
        first = [Write(self._room, part, []) for part in _parts(removals)]
        return self._least([*first, *(Write(self._room, [], part) for part in _parts(_entries(digests, slots)))])

    def read(self, digests: Sequence[bytes], slots: Sequence[Mapping[int, Entry]]) -> Callable[[], int]:
        """Read files; return how many from the first on all ranks have."""
        return self._least([Read(self._room, part) for part in _parts(_entries(digests, slots))])

    def remove(self, gone: Sequence[tuple[bytes, Stored]]) -> None:
        """Remove files. Nobody waits: what is left over then counts for no rank when the next worker begins."""
        self.write(gone, (), ())

    def _least(self, questions: Sequence[Question]) -> Callable[[], int]:
        answers = self._ask(questions)
        return lambda: min(_well(rank) for rank in answers())


def _entries(digests: Sequence[bytes], slots: Sequence[Mapping[int, Entry]]) -> list[Entries]:
    return [
        Entries(digest, {number: [*entry] for number, entry in of.items()})
        for digest, of in zip(digests, slots, strict=True)
    ]


def _parts(files: Sequence[T]) -> list[list[T]]:
    return [[*files[at : at + FILES_OF_A_QUESTION]] for at in range(0, len(files), FILES_OF_A_QUESTION)]


def _well(answer: bytes) -> int:
    """The files that a rank wrote or read before one failed: it says a byte for each."""
    return len(answer.partition(b"\0")[0])


def common_files(ask: Ask, folder: Path, found: Mapping[bytes, Stored]) -> dict[bytes, Stored]:
    """Have all ranks claim theirs beside our folder; of our files return those that all have, and remove theirs that are none."""
    theirs = [
        {each.digest: frozenset(each.numbers) for each in msgspec.msgpack.decode(answer, type=list[File])}
        for answer in ask([TakeFolder(str(folder))])()
    ]
    kept = {
        digest: stored
        for digest, stored in found.items()
        if all(files.get(digest) == stored.numbers for files in theirs)
    }
    useless = {(digest, numbers) for files in theirs for digest, numbers in files.items() if digest not in kept}
    FurtherFiles(ask, Room(0)).write([(digest, Stored(numbers, 0)) for digest, numbers in useless], (), ())()
    return kept
