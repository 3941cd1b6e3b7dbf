"""The receiving end of a UCX link: it accepts only runs of blocks that a lease expects at that moment."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.pages import LANE_BYTES
from kvtransfer.cuda.mover import MAX_BLOCKS
from kvtransfer.plan import Runs
from kvtransfer.ucx.memory import SLOTS, PoolMemory, Slot
from kvtransfer.ucx.protocol import (
    ANSWER,
    CONNECT_TIMEOUT_S,
    DROPPED,
    GREETING,
    HEADER,
    HELLO,
    MAGIC,
    PROBE,
    RUN_TIMEOUT_S,
    RUN_WORDS,
    SHARE,
    TAKEN,
    WELCOME,
    WRITE,
)
from kvtransfer.ucx.wire import Array, Tag, Wire, abort

log = logging.getLogger("baton.ucx")


class Expected:
    """The blocks that one lease may still write."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._allowed = frozenset(blocks)
        self._missing = set(blocks)
        self.complete = asyncio.Event()
        self.took([])

    def covers(self, blocks: list[int]) -> bool:
        return self._allowed.issuperset(blocks)

    def took(self, blocks: list[int]) -> None:
        self._missing.difference_update(blocks)
        if not self._missing:
            self.complete.set()


Leases = dict[tuple[int, int], Expected]  # by lease and generation


class Door:
    """A new connection whose writer is not known yet."""

    def __init__(self, wire: Wire, endpoint: Any) -> None:
        self._wire, self.endpoint = wire, endpoint
        self.tag = secrets.randbits(63) & ~1  # tag of headers; pieces use the next one
        self.answers = Tag(0)

    async def greet(self, token: bytes) -> bool:
        """Return True if the writer speaks our protocol and may write."""
        await self.send(GREETING)
        magic, shown, answers = HELLO.unpack(await self._read(HELLO.size))
        if magic != MAGIC:
            log.warning("ucx.unknown_protocol", extra={"magic": repr(magic), "remedy": "upgrade one release at a time"})
            return False
        if not secrets.compare_digest(shown, token):
            log.warning("ucx.stranger")
            return False
        self.answers = Tag(answers)
        return True

    async def send(self, message: bytes) -> None:
        """Send part of the greeting."""
        await self._wire.end(self.endpoint, self.endpoint.stream_send(Array(message)))

    async def _read(self, num_bytes: int) -> bytes:
        message = bytearray(num_bytes)
        await self._wire.end(self.endpoint, self.endpoint.stream_recv(Array(message)))
        return bytes(message)


class Incoming:
    """A connection from one writer: its slots, a receive posted for each."""

    def __init__(self, wire: Wire, memory: PoolMemory, door: Door, leases: Leases) -> None:
        self._wire, self._memory, self._door, self._leases = wire, memory, door, leases
        self._endpoint = door.endpoint
        self._header = np.zeros(HEADER.size + 4 * MAX_BLOCKS, np.uint8)
        self._slots: list[Slot] = []
        self._posted: list[Any] = []
        self._next = 0  # slot of the next piece
        self._unpacking: int | None = None  # slot of the last one, until it is posted again
        self._tag = Tag(door.tag + 1)

    async def serve(self) -> None:
        """Receive runs until the writer disconnects (raises) or violates the protocol."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self._welcome()
        header = Array(self._header)
        while True:
            await self._wire.idle(self._endpoint, self._endpoint.tag_recv(header, Tag(self._door.tag)))
            lease_id, generation, count, per_piece, kind, num_runs = HEADER.unpack_from(self._header.data)
            runs = self._runs(num_runs) if kind == SHARE else []
            if not self._makes_sense(count, per_piece, kind, runs):
                log.warning("ucx.bad_header", extra={"kind": kind, "count": count, "per_piece": per_piece})
                return
            self._wire.hold()
            async with asyncio.timeout(RUN_TIMEOUT_S):
                if runs:
                    await self._memory.will_unpack(self._slots, runs)
                pieces = self._pieces(count, per_piece, kind, RUN_WORDS * len(runs))
                taken = await self._take((lease_id, generation), pieces, runs)
                await answer(self._wire, self._door, taken)

    async def _welcome(self) -> None:
        self._slots = await self._memory.slots(SLOTS, self._memory.slot_bytes)
        self._posted = [self._post(slot) for slot in self._slots]
        await self._door.send(WELCOME.pack(MAGIC, self._door.tag, self._memory.slot_bytes))

    def _post(self, slot: Slot) -> Any:
        return self._endpoint.tag_recv(slot.array(self._memory.slot_bytes), self._tag)

    @property
    def _words(self) -> npt.NDArray[np.uint32]:
        return self._header[HEADER.size :].view(np.uint32)

    def _runs(self, count: int) -> list[Runs]:
        """The runs of a share, in bytes."""
        words = (LANE_BYTES * self._words[: RUN_WORDS * count].astype(np.int64)).reshape(-1, RUN_WORDS).tolist()
        return [
            Runs(source=0, destination=first, num_bytes=size, count=often // LANE_BYTES, destination_step=step)
            for first, size, often, step in words
        ]

    def _makes_sense(self, count: int, per_piece: int, kind: int, runs: Sequence[Runs]) -> bool:
        block_bytes = self._memory.block_bytes
        if kind == SHARE:
            if not runs or not all(_is_within(run, block_bytes) for run in runs):
                return False
            block_bytes = sum(run.count * run.num_bytes for run in runs)
        fits = 0 < per_piece * block_bytes <= self._memory.slot_bytes
        return kind in (WRITE, PROBE, SHARE) and 0 < count <= MAX_BLOCKS - RUN_WORDS * len(runs) and fits

    def _pieces(self, count: int, per_piece: int, kind: int, first_word: int) -> list[list[int]]:
        """Yield the blocks of each following message; none if the link is only measured."""
        if kind == PROBE:
            return [[] for _ in range(count)]
        blocks = self._words[first_word : first_word + count].tolist()
        return [blocks[start : start + per_piece] for start in range(0, count, per_piece)]

    async def _take(self, lease: tuple[int, int], pieces: list[list[int]], runs: Sequence[Runs]) -> bool:
        """Receive a run, unpacking each piece while waiting for the next. Return False if a piece was not expected.

        No unpacking goes on while another task may run (`_settle`): after `forget` a lease's blocks may be used at once.
        """
        taken = True
        for piece in pieces:
            await self._wire.end(self._endpoint, self._posted[self._next], settle=self._settle)
            self._settle()
            taken = taken and begin_to_unpack(self._leases, lease, self._slots[self._next], piece, runs)
            self._unpacking, self._next = self._next, (self._next + 1) % len(self._slots)
        self._settle()
        return taken

    def _settle(self) -> None:
        """Wait until the last piece is in place, and post its slot again."""
        if self._unpacking is not None:
            at = self._unpacking
            self._await_unpacking()
            self._posted[at] = self._post(self._slots[at])

    def _await_unpacking(self) -> None:
        if self._unpacking is not None:
            self._slots[self._unpacking].unpacked(self._wire.progress)
            self._unpacking = None

    def end(self) -> None:
        self._await_unpacking()
        self._posted.clear()
        abort(self._endpoint)
        if self._slots:
            self._memory.keep(self._slots, self._memory.slot_bytes)


def _is_within(run: Runs, block_bytes: int) -> bool:
    return (
        run.count > 0
        and run.num_bytes > 0
        and run.destination + (run.count - 1) * run.destination_step + run.num_bytes <= block_bytes
    )


def begin_to_unpack(
    leases: Leases, lease: tuple[int, int], slot: Slot, blocks: list[int], runs: Sequence[Runs] = ()
) -> bool:
    """Start writing a message's blocks into the pool if the lease expects them *now*; return False if not.

    The caller calls the slot's `unpacked` before its next await: `forget` could run there.
    """
    if blocks:
        expected = leases.get(lease)
        if expected is None or not expected.covers(blocks):
            return False
        slot.unpack(blocks, runs)
        expected.took(blocks)
    return True


async def answer(wire: Wire, door: Door, taken: bool) -> None:
    """Tell the writer if its run was written or dropped."""
    message = ANSWER.pack(TAKEN if taken else DROPPED)
    await wire.end(door.endpoint, door.endpoint.tag_send(Array(message), door.answers))
