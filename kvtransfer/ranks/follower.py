"""A further rank's side of transfers: it does what the leader's messages say until their channel ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

import msgspec
import torch

from common.messages import KVLayout, Region
from kvtransfer.plan import blocks_per_entry
from kvtransfer.ranks.end import OwnRank
from kvtransfer.ranks.protocol import ANSWER, HEAD, Call, moves_in, unpacked_words
from kvtransfer.transport import TransferError, Transport

log = logging.getLogger("baton.ranks")


Below = Callable[[bytes], bytes]


async def follow(
    channel: socket.socket,
    transport: Transport,
    pool: torch.Tensor,
    layout: KVLayout,
    rank: int,
    below: Below | None = None,
) -> None:
    """Serve the leader until it closes the channel or dies; then close the transport. `pool` is the transport's.

    `below(question)` answers, on a thread, what is asked about the tiers below the pool.
    """
    reader, writer = await asyncio.open_connection(sock=channel)
    follower = Follower(transport, pool, layout, rank, below)
    calls = set[asyncio.Task[None]]()
    try:
        while True:
            head = await reader.readexactly(HEAD.size)
            payload = await reader.readexactly(HEAD.unpack(head)[0])
            # A call that is over at once is over before the next is read: a lease is expected, or forgotten, in order.
            call = asyncio.create_task(_answer(follower, writer, head, payload))
            calls.add(call)
            call.add_done_callback(calls.discard)
            await asyncio.sleep(0)
    except (asyncio.IncompleteReadError, ConnectionError):
        log.debug("ranks.leader_left")
    finally:
        if calls:
            await asyncio.wait(set(calls))
        writer.close()
        await transport.close()


async def _answer(follower: Follower, writer: asyncio.StreamWriter, head: bytes, payload: bytes) -> None:
    _, number, kind, peer, ms, lease, generation = HEAD.unpack(head)
    try:
        answer = await follower.do(kind, peer, ms, lease, generation, payload)
        is_well = True
    except Exception as error:  # whatever it is: nobody bounds the leader's wait for what is written
        if not isinstance(error, TransferError | ValueError | OSError | MemoryError | RuntimeError):
            log.exception("ranks.call_failed")
        answer, is_well = (str(error) or type(error).__name__).encode(), False
    writer.write(ANSWER.pack(len(answer), number, is_well) + answer)


class Follower:
    """The calls that a follower answers."""

    def __init__(
        self, transport: Transport, pool: torch.Tensor, layout: KVLayout, rank: int, below: Below | None = None
    ) -> None:
        self._transport, self._pool, self._layout, self._rank, self._below = transport, pool, layout, rank, below
        self._own = OwnRank(transport, pool, [layout], 0)  # until `RANKS`

    async def do(self, kind: int, peer: int, ms: int, lease: int, generation: int, payload: bytes) -> bytes:
        """Answer one call. Raises TransferError, ValueError."""
        match Call(kind):
            case Call.OPEN:
                return msgspec.json.encode(await self._transport.open(self._pool, self._layout, lease))
            case Call.RANKS:
                layouts = msgspec.json.decode(payload, type=list[KVLayout])
                self._own = OwnRank(self._transport, self._pool, layouts, self._rank)
            case Call.CONNECT:
                region = msgspec.json.decode(payload, type=Region)
                return struct.pack("<d", await self._own.connect(peer, region))
            case Call.PUSH:
                moves = moves_in(unpacked_words(payload), blocks_per_entry(self._layout))
                return await self._own.push(peer, (lease, generation), moves, ms / 1000)
            case Call.EXPECT:
                self._transport.expect(lease, generation, unpacked_words(payload))
            case Call.ARRIVED:
                return bytes([await self._own.arrived((lease, generation), ms / 1000)])
            case Call.FORGET:
                self._transport.forget(lease, generation)
            case Call.DIGESTS:
                return await self._own.digests(unpacked_words(payload))
            case Call.BELOW:
                if self._below is None:
                    raise TransferError("this rank has no tiers below its pool")
                return await asyncio.to_thread(self._below, payload)
        return b""
