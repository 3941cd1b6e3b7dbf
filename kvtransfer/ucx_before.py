"""UCX links with workers of the release before, so that pools are upgraded worker by worker; to be dropped with the next one.

Protocol 1: both ends say their peer info, then each message is a header that shows the token, the destination blocks (u32 each)
and the blocks' bytes, on one tag, and is answered before the next. Its receiver takes up to `message_bytes` at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtransfer.blocks import MOST_BLOCKS
from kvtransfer.transport import TransferError
from kvtransfer.ucx_memory import HostMemory, PoolMemory, Slot
from kvtransfer.ucx_protocol import PEER_INFO, PROBE, RUN_TIMEOUT_S, WRITE, peer_info, tag_in
from kvtransfer.ucx_receive import Door, Leases, answer, unpack
from kvtransfer.ucx_send import UcxLink, check_taken
from kvtransfer.ucx_wire import Array, Tag, Wire, abort

log = logging.getLogger("baton.ucx")

_HEADER = struct.Struct("<8s16sQQIB19x")  # magic, token, lease, generation, number of blocks, kind
_MAGIC = b"BATON-1\0"


def message_bytes(memory: PoolMemory) -> int:
    """The most bytes of one message of protocol 1; an eighth of it measures a link."""
    return (32 if isinstance(memory, HostMemory) else 256) << 20


class OldIncoming:
    """A connection from one writer of protocol 1."""

    def __init__(self, wire: Wire, memory: PoolMemory, door: Door, leases: Leases, token: bytes) -> None:
        self._wire, self._memory, self._door, self._leases, self._token = wire, memory, door, leases, token
        self._size = max(message_bytes(memory), memory.block_bytes)
        self._slots: list[Slot] = []

    async def serve(self) -> None:
        """Take messages until the writer is gone, which raises, or sends what makes no sense."""
        log.info("ucx.peer_of_the_release_before", extra={"end": "writer"})
        self._slots = await self._memory.slots(1, self._size)
        while True:
            header = bytearray(_HEADER.size)
            await self._wire.idle(self._door.endpoint, self._receive(Array(header)))
            magic, token, lease_id, generation, count, kind = _HEADER.unpack(header)
            if magic != _MAGIC or not secrets.compare_digest(token, self._token):
                log.warning("ucx.stranger")
                return
            most = min(MOST_BLOCKS, self._size // self._memory.block_bytes)
            if kind not in (WRITE, PROBE) or (kind == WRITE and not 0 < count <= most):
                log.warning("ucx.bad_header", extra={"kind": kind, "count": count})
                return
            async with asyncio.timeout(RUN_TIMEOUT_S):
                taken = await self._take((lease_id, generation), count if kind == WRITE else 0)
                await answer(self._wire, self._door, taken)

    async def _take(self, lease: tuple[int, int], count: int) -> bool:
        """Receive one message (0: of measuring) and unpack it. False if it was not expected."""
        blocks = np.zeros(count, np.uint32)
        if count:
            await self._wire.end(self._door.endpoint, self._receive(Array(blocks)))
        size = count * self._memory.block_bytes or message_bytes(self._memory) // 8
        await self._wire.end(self._door.endpoint, self._receive(self._slots[0].array(size)))
        return unpack(self._wire, self._leases, lease, self._slots[0], blocks.tolist())

    def _receive(self, array: Array) -> Any:
        return self._door.endpoint.tag_recv(array, Tag(self._door.tag))

    def end(self) -> None:
        """Drop the connection."""
        abort(self._door.endpoint)
        if self._slots:
            self._memory.keep(self._slots, self._size)


class OldLink(UcxLink):
    """An endpoint to a receiver of protocol 1: a message a piece, each answered before the next."""

    _token = b""

    async def _greet(self, token: bytes) -> None:
        log.info("ucx.peer_of_the_release_before", extra={"end": "receiver"})
        self._token, self._answers = token, secrets.randbits(63)
        tag = tag_in(await self._read_greeting(PEER_INFO.size))
        if tag is None:
            raise TransferError("the peer speaks another protocol")
        self._tag = tag
        await self._send_greeting(peer_info(self._answers))

    async def _measure(self) -> None:
        size = min(message_bytes(self._memory) // 8, self._slot_bytes)
        for _ in range(2):  # the first one pays for the connection's set-up
            started = time.perf_counter()
            await self._message(PROBE, 0, 0, (), size)
            self.bandwidth = size / (time.perf_counter() - started)

    async def _run(
        self,
        kind: int,
        lease_id: int,
        generation: int,
        pieces: Sequence[Sequence[int]],
        per_piece: int,
        targets: Sequence[int] = (),
    ) -> bytes:
        digests = b""
        for index, piece in enumerate(pieces):
            slot = await self._pack(piece)
            digests += await self._slots[slot].packed(self._wire)
            named = targets[index * per_piece : index * per_piece + len(piece)]
            await self._message(kind, lease_id, generation, named, len(piece) * self._memory.block_bytes, slot)
        return digests

    async def _message(
        self, kind: int, lease_id: int, generation: int, blocks: Sequence[int], size: int, slot: int = 0
    ) -> None:
        """Send one message, its bytes from a slot, and wait for the answer."""
        header = _HEADER.pack(_MAGIC, self._token, lease_id, generation, len(blocks), kind)
        await self._send(Array(header))
        if kind == WRITE:
            await self._send(Array(np.asarray(blocks, np.uint32)))
        self._send_slot(slot, size, Tag(self._tag))
        answer = bytearray(8)
        await self._wire.end(self._endpoint, self._endpoint.tag_recv(Array(answer), Tag(self._answers)))
        check_taken(answer)

    async def _send(self, array: Array) -> None:
        await self._wire.end(self._endpoint, self._endpoint.tag_send(array, Tag(self._tag)))
