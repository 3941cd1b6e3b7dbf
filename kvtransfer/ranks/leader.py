"""The first rank's side of transfers: to its worker a transport as any other, for pools and peers of any width.

A push is over when every rank wrote its share, a lease has arrived when it did at every rank, and digests add up. A rank that
dies in the middle fails the push once none of its writes can land. Between workers of one rank nothing is added: the
transport's own link moves whole blocks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Sequence

import msgspec
import torch

from common.messages import KVLayout, Region
from kvtransfer.host import added
from kvtransfer.plan import Item
from kvtransfer.ranks.end import OwnRank, Rank, all_ended
from kvtransfer.ranks.protocol import ANSWER, HEAD, Call, in_messages, packed_words, words_of
from kvtransfer.shares import Move, Share
from kvtransfer.transport import Link, ShareLink, TransferError, Transport

log = logging.getLogger("baton.ranks")

CALL_TIMEOUT_S = 10.0
OPEN_S = 50.0  # more: a kernel that digests blocks may be compiled
LOOK_S = 0.05


class RankedTransport:
    """A transport of a worker whose further ranks are reached by these channels, in their order."""

    def __init__(self, transport: Transport, channels: Sequence[socket.socket] = ()) -> None:
        self.name = transport.name
        self._transport = transport
        self._channels = channels
        self._followers: list[FollowerRank] = []
        self._own: OwnRank | None = None
        self._links: dict[str, RankedLink] = {}  # by a peer's incarnation and addresses
        self._opened = 0
        self._expected: set[tuple[int, int]] = set()
        self._telling: set[asyncio.Task[bytes]] = set()  # calls that are not confirmed

    @classmethod
    def beside(cls, transport: Transport, pool: torch.Tensor, layout: KVLayout) -> RankedTransport:
        """The way to peers of several ranks, of a worker of one that has this transport open on its pool."""
        wide = cls(transport)
        wide._own = OwnRank(transport, pool, [layout], 0)
        return wide

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        return self._transport.allocate(shape, dtype, device)

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        regions = [await self._transport.open(pool, layout, incarnation)]
        for number, channel in enumerate(self._channels, 1):
            follower = await FollowerRank.open(channel, number, incarnation, self._transport.writer_gone)
            self._followers.append(follower)
            regions.append(follower.region)
        layouts = [region.layout for region in regions]
        for follower in self._followers:
            await follower.call(Call.RANKS, msgspec.json.encode(layouts))
        self._own = OwnRank(self._transport, pool, layouts, 0)
        return Region.joined(regions)

    async def connect(self, region: Region) -> Link:
        assert self._own is not None
        if not self._followers and not region.ranks and self._own.layout.compatible_with(region.layout):
            return await self._transport.connect(region)
        self._links = {key: link for key, link in self._links.items() if not link.closed}
        key = f"{region.incarnation} {[one.address for one in region.each]}"
        if key not in self._links:
            peer, self._opened = self._opened, (self._opened + 1) % 2**16
            ranks: list[Rank] = [self._own, *self._followers]
            bandwidths = await asyncio.gather(*(rank.connect(peer, region) for rank in ranks))
            self._links[key] = RankedLink(ranks, peer, sum(bandwidths))
        return self._links[key]

    async def connect_share(self, region: Region, share: Share) -> ShareLink:
        return await self._transport.connect_share(region, share)

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        self._transport.expect(lease_id, generation, blocks)
        self._expected.add((lease_id, generation))
        self._tell(Call.EXPECT, (lease_id, generation), packed_words(blocks))

    async def told(self) -> None:
        """Wait until every rank accepts the writes that `expect` named."""
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=CALL_TIMEOUT_S)

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        assert self._own is not None
        ranks: list[Rank] = [self._own, *self._followers]
        try:
            return all(await asyncio.gather(*(rank.arrived((lease_id, generation), timeout_s) for rank in ranks)))
        except TransferError:
            return False

    def forget(self, lease_id: int, generation: int) -> None:
        self._transport.forget(lease_id, generation)
        if (lease_id, generation) in self._expected:
            self._expected.remove((lease_id, generation))
            self._tell(Call.FORGET, (lease_id, generation))

    def _tell(self, kind: Call, lease: tuple[int, int], payload: bytes = b"") -> None:
        for follower in self._followers:
            told = asyncio.ensure_future(follower.call(kind, payload, lease=lease))
            self._telling.add(told)
            told.add_done_callback(self._was_told)

    def _was_told(self, told: asyncio.Task[bytes]) -> None:
        self._telling.discard(told)
        if not told.cancelled() and (error := told.exception()) is not None:
            log.warning("ranks.not_told", extra={"error": str(error)})

    def writer_gone(self, writer: Region | None) -> bool:
        """True once all ranks of the writer are gone, and all of ours have forgotten what was to be forgotten."""
        gone = self._transport.writer_gone
        return not self._telling and (gone(None) if writer is None else all(gone(one) for one in writer.each))

    async def digests(self, blocks: Sequence[int]) -> bytes:
        """Return the digests of blocks, all ranks' added. Raises TransferError."""
        assert self._own is not None
        ranks: list[Rank] = [self._own, *self._followers]
        return added(await all_ended([rank.digests(blocks) for rank in ranks]))

    @property
    def num_further(self) -> int:
        return len(self._channels)

    async def below(self, questions: Sequence[bytes]) -> list[bytes]:
        """Ask every further rank about its tiers, one question after the other; return each one's answers, joined."""
        return await all_ended([follower.below(questions) for follower in self._followers])

    async def close(self) -> None:
        for follower in self._followers:
            await follower.close()
        await self._transport.close()


class RankedLink:
    """The links of all our ranks to all ranks of a peer."""

    def __init__(self, ranks: Sequence[Rank], peer: int, bandwidth: float) -> None:
        self._ranks, self._peer = ranks, peer
        self.bandwidth = bandwidth
        self.closed = False  # after a failure: the next connect opens another

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        if len(source_blocks) != len(destination_blocks):
            raise TransferError(f"{len(source_blocks)} source blocks for {len(destination_blocks)} destinations")
        pairs = zip(source_blocks, destination_blocks, strict=True)
        moves = [Move(Item(0, 0), target, (source,)) for source, target in pairs]
        return await self.push_entries(lease_id=lease_id, generation=generation, moves=moves, timeout_s=timeout_s)

    async def push_entries(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        """Have every rank write its share; return the digests of the blocks, added over all ranks."""
        pushes = [rank.push(self._peer, (lease_id, generation), moves, timeout_s) for rank in self._ranks]
        try:
            return added(await all_ended(pushes))
        except BaseException:  # given up, it may have ended one of the links
            self.closed = True
            raise

    async def close(self) -> None:
        """No-op: each rank's transport closes its links."""


class FollowerRank:
    """A further rank, told by messages on its channel."""

    def __init__(
        self, channel: tuple[asyncio.StreamReader, asyncio.StreamWriter], number: int, gone: Callable[[Region], bool]
    ) -> None:
        self._reader, self._writer = channel
        self._number, self._gone = number, gone
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._last = 0
        self._is_lost = self._is_closed = False
        self.region: Region
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def open(
        cls, channel: socket.socket, number: int, incarnation: int, gone: Callable[[Region], bool]
    ) -> FollowerRank:
        """Have the rank share its pool. Raises TransferError."""
        follower = cls(await asyncio.open_connection(sock=channel), number, gone)
        region = await follower.call(Call.OPEN, lease=(incarnation, 0), timeout_s=OPEN_S)
        follower.region = msgspec.json.decode(region, type=Region)
        return follower

    async def connect(self, peer: int, region: Region) -> float:
        bandwidth: float
        (bandwidth,) = struct.unpack("<d", await self.call(Call.CONNECT, msgspec.json.encode(region), peer=peer))
        return bandwidth

    async def push(self, peer: int, lease: tuple[int, int], moves: Sequence[Move], timeout_s: float) -> bytes:
        return b"".join(
            [
                await self._written(
                    Call.PUSH, packed_words(words_of(part)), peer=peer, lease=lease, timeout_s=timeout_s
                )
                for part in in_messages(moves)
            ]
        )

    async def arrived(self, lease: tuple[int, int], timeout_s: float) -> bool:
        return await self.call(Call.ARRIVED, lease=lease, timeout_s=timeout_s) == b"\1"

    async def digests(self, blocks: Sequence[int]) -> bytes:
        return await self.call(Call.DIGESTS, packed_words(blocks))

    async def below(self, questions: Sequence[bytes]) -> bytes:
        return b"".join(
            [await self._written(Call.BELOW, question, peer=0, lease=(0, 0), timeout_s=0.0) for question in questions]
        )

    async def call(
        self,
        kind: Call,
        payload: bytes = b"",
        *,
        peer: int = 0,
        lease: tuple[int, int] = (0, 0),
        timeout_s: float = 0.0,
    ) -> bytes:
        """Send a call under which nothing is written, and wait for its answer. Raises TransferError."""
        try:
            async with asyncio.timeout(timeout_s + CALL_TIMEOUT_S):
                return await self._send(kind, payload, peer, lease, timeout_s)
        except TimeoutError:
            raise TransferError(f"rank {self._number} does not answer") from None

    async def _written(
        self, kind: Call, payload: bytes, *, peer: int, lease: tuple[int, int], timeout_s: float
    ) -> bytes:
        """Send a call under which blocks are written. It ends with its answer or the rank, however long that takes."""
        sent = asyncio.ensure_future(self._send(kind, payload, peer, lease, timeout_s))
        try:
            return await asyncio.shield(sent)
        except asyncio.CancelledError:
            await asyncio.wait([sent])
            raise

    def _send(
        self, kind: Call, payload: bytes, peer: int, lease: tuple[int, int], timeout_s: float
    ) -> asyncio.Future[bytes]:
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._is_lost:
            answered.set_exception(TransferError(f"rank {self._number} is gone"))
            return answered
        self._last = (self._last + 1) % 2**32
        self._calls[self._last] = answered
        head = HEAD.pack(len(payload), self._last, kind, peer, int(1000 * timeout_s), *lease)
        self._writer.write(head + payload)
        return answered

    async def _listen(self) -> None:
        try:
            while True:
                size, number, is_well = ANSWER.unpack(await self._reader.readexactly(ANSWER.size))
                payload = await self._reader.readexactly(size)
                answered = self._calls.pop(number, None)
                if answered is None or answered.done():
                    continue
                if is_well:
                    answered.set_result(payload)
                else:
                    answered.set_exception(TransferError(f"rank {self._number}: {payload.decode(errors='replace')}"))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._is_lost = True
            if not self._is_closed:
                log.error("ranks.lost", extra={"rank": self._number})
            await self._fail_all()

    async def _fail_all(self) -> None:
        """Fail the calls of a rank that died, once none of its writes can land."""
        while hasattr(self, "region") and not self._gone(self.region):
            await asyncio.sleep(LOOK_S)
        for answered in self._calls.values():
            if not answered.done():
                answered.set_exception(TransferError(f"rank {self._number} is gone"))
        self._calls.clear()

    async def close(self) -> None:
        """End the channel: the rank finishes its writes, and closes its transport."""
        self._is_closed = True
        self._writer.close()
        await asyncio.wait([self._listening], timeout=CALL_TIMEOUT_S)
