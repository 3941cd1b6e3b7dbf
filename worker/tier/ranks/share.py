"""A further rank's side: its shares of blocks in memory and in files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock

import msgspec
import torch

from common.pages import KVLayout
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import HostStore, PrivateStore
from worker.tier.kv_files import KVFiles, Stored, TornFileError
from worker.tier.ranks.questions import QUESTIONS, Entries, File, Load, Read, Room, Store, TakeFolder, Write
from worker.tier.region import Beside
from worker.tier.shared_store import chunk_of


class SharesBelow:
    """A further rank's shares below its pool. The first rank's threads ask, each one question at a time."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout, rank: int) -> None:
        self._kv, self._layout, self._rank = kv, layout, rank
        self._memory: HostMemory | None = None
        self._taking = Lock()  # held while that comes
        self._files: KVFiles | None = None
        self._stored: dict[bytes, Stored] = {}

    def answer(self, question: bytes) -> bytes:
        """Do what is asked. Raises ValueError, OSError, MemoryError, or the device's RuntimeError."""
        match asked := QUESTIONS.decode(question):
            case Store():
                return self._memory_of(asked).store_blocks(asked.slots, asked.blocks)
            case Load():
                return self._memory_of(asked).load(asked.slots, asked.blocks)
            case TakeFolder():
                self._files = KVFiles.claim_beside(Path(asked.folder), self._layout, self._rank)
                self._stored = self._files.scan()
                found = [File(digest, [*each.numbers]) for digest, each in self._stored.items()]
                return msgspec.msgpack.encode(found)
            case Write():
                return self._write(asked)
            case Read():
                return self._read(asked)

    def _memory_of(self, asked: Store | Load | Write | Read) -> HostMemory:
        with self._taking:  # threads of copies and of files may both ask first
            if self._memory is None:
                self._memory = HostMemory(self._kv, self._layout, self._store_of(asked.room))
        blocks = asked.blocks if isinstance(asked, Store | Load) else []
        slots = asked.slots if isinstance(asked, Store | Load) else _slots_of(asked.files)
        for number, count in ((blocks, len(self._kv)), (slots, self._memory.store.num_slots)):
            if any(not 0 <= each < count for each in number):
                raise ValueError(f"a copy between blocks and slots that aren't there: of {count} one")
        return self._memory

    def _store_of(self, room: Room) -> HostStore:
        if not room.region:
            return PrivateStore(room.num_slots)
        block_bytes = self._layout.block_bytes
        beside = Beside(Path(room.region), self._rank, room.num_slots, block_bytes)
        return PrivateStore(room.num_slots, partial(chunk_of, beside.reach))

    def _write(self, asked: Write) -> bytes:
        files, said = self._claimed(), b""
        for each in asked.gone:
            gone = Stored(frozenset(each.numbers), 0)
            files.remove([(each.digest, gone)])
            if (known := self._stored.get(each.digest)) is not None and known.numbers == gone.numbers:
                del self._stored[each.digest]
        for entries in asked.files:
            views = self._views(asked, entries)
            with contextlib.suppress(OSError):
                # Digests are compared where the block is loaded: the first rank has those of all.
                self._stored[entries.digest] = files.write(
                    entries.digest, {number: (b"", of) for number, of in views.items()}
                )
                said += b"\1"
                continue
            said += b"\0"
        return said

    def _read(self, asked: Read) -> bytes:
        files, said = self._claimed(), b""
        for entries in asked.files:
            views, stored = self._views(asked, entries), self._stored.get(entries.digest)
            with contextlib.suppress(OSError, TornFileError):
                if stored is not None:
                    files.read(entries.digest, stored, views)
                    said += b"\1"
                    continue
            said += b"\0"
        return said

    def _claimed(self) -> KVFiles:
        if self._files is None:
            raise ValueError("there is no folder for files yet")
        return self._files

    def _views(self, asked: Write | Read, entries: Entries) -> dict[int, list[memoryview]]:
        memory = self._memory_of(asked)
        return {number: [memory.slot(slot).numpy().data for slot in of] for number, of in entries.slots.items()}


def _slots_of(files: Sequence[Entries]) -> list[int]:
    return [slot for each in files for entry in each.slots.values() for slot in entry]
