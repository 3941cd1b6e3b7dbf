"""The writing end of a UCX link: sends a run in pieces, each while the next is packed."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from common.messages import Region
from common.pages import LANE_BYTES
from kvtransfer.cuda.mover import MAX_BLOCKS
from kvtransfer.shares import Move, Piece, Share
from kvtransfer.transport import TransferError, check_moves, check_run
from kvtransfer.ucx.memory import SLOTS, PoolMemory, Slot, piece_blocks
from kvtransfer.ucx.protocol import (
    CONNECT_TIMEOUT_S,
    GREETING,
    HEADER,
    HELLO,
    MAGIC,
    PROBE,
    RUN_WORDS,
    SHARE,
    TAKEN,
    WELCOME,
    WRITE,
)
from kvtransfer.ucx.wire import Array, Tag, Wire, abort

PROBE_TIMEOUT_S = 10.0
PIECES_AHEAD = 2  # packed while others are on the wire
# Header ids are padded to a multiple of this: UCX sends much faster from known buffers, so few sizes are used.
IDS_PADDING = 64


@dataclass(frozen=True, slots=True)
class Pieces:
    """The messages of a run: their blocks, or moves of which they have a share, and how many there are in one at most."""

    kind: int
    parts: Sequence[Sequence[Any]]
    most: int
    num_bytes: int  # a block's
    share: Piece | None = None


class UcxLink:
    """An endpoint to one peer's pool, which takes our `share` of its blocks; None: whole ones. At most one run is in flight."""

    def __init__(
        self, wire: Wire, memory: PoolMemory, endpoint: Any, region: Region, share: Share | None = None
    ) -> None:
        self._wire, self._memory, self._endpoint, self._share = wire, memory, endpoint, share
        self._layout = region.layout
        self._header = np.zeros(HEADER.size + 4 * MAX_BLOCKS, np.uint8)
        self._ids = self._header[HEADER.size :].view(np.uint32)
        self._headers: dict[int, Array] = {}  # by bytes
        self._answer = bytearray(8)
        self._answer_array = Array(self._answer)
        self._slots: list[Slot] = []
        self._sent: list[Any] = []  # by slot: the send that may still read its buffer
        self._next = 0  # slot of the next piece
        self._tag = self._answers = 0
        self._slot_bytes = memory.slot_bytes
        self._turn = asyncio.Lock()
        self.bandwidth = 0.0
        self.closed = False

    @classmethod
    async def open(cls, wire: Wire, memory: PoolMemory, region: Region, share: Share | None = None) -> UcxLink:
        """Connect and measure the link once. Raises TransferError."""
        try:
            endpoint = wire.connect(region.address["host"], int(region.address["port"]))
            token = bytes.fromhex(region.address["token"])
        except Exception as error:
            raise TransferError(f"no UCX connection: {type(error).__name__} {error}") from error
        link = cls(wire, memory, endpoint, region, share)
        try:
            async with link._exchange(CONNECT_TIMEOUT_S):
                await link._greet(token)
                link._slots = await memory.slots(SLOTS, memory.slot_bytes)
                link._sent = [None] * len(link._slots)
            if share is not None:
                await link._prepare(share)
            async with link._exchange(PROBE_TIMEOUT_S):
                await link._measure()
        except TransferError:
            await link.close()
            raise
        return link

    async def _greet(self, token: bytes) -> None:
        self._answers = secrets.randbits(63)
        await self._send_greeting(HELLO.pack(MAGIC, token, self._answers))
        await self._read_greeting(len(GREETING))
        magic, self._tag, slot_bytes = WELCOME.unpack(await self._read_greeting(WELCOME.size))
        if magic != MAGIC:
            raise TransferError("the peer speaks another protocol")
        self._slot_bytes = min(slot_bytes, self._memory.slot_bytes)

    async def _prepare(self, share: Share) -> None:
        """Compile what packs our share, which may take longer than an answer."""
        pieces = list(dict.fromkeys(piece for group in share.groups for piece in group))
        try:
            await self._memory.will_pack(self._slots, pieces, self._layout)
        except MemoryError as error:
            raise TransferError(str(error)) from error

    async def _send_greeting(self, message: bytes) -> None:
        await self._wire.end(self._endpoint, self._endpoint.stream_send(Array(message)))

    async def _read_greeting(self, num_bytes: int) -> bytes:
        message = bytearray(num_bytes)
        await self._wire.end(self._endpoint, self._endpoint.stream_recv(Array(message)))
        return bytes(message)

    async def _measure(self) -> None:
        """Send all slots twice: the first time includes set-up and mapping."""
        per_piece = max(1, self._slot_bytes // self._layout.block_bytes)
        num_bytes = min(self._slot_bytes, per_piece * self._layout.block_bytes)
        for _ in range(2):
            started = time.perf_counter()
            await self._run(Pieces(PROBE, [[]] * len(self._slots), per_piece, num_bytes // per_piece))
            self.bandwidth = len(self._slots) * num_bytes / (time.perf_counter() - started)

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        memory = self._memory
        check_run(
            source_blocks, destination_blocks, num_source=memory.num_blocks, num_destination=self._layout.num_blocks
        )
        digests = b""
        async with self._exchange(timeout_s):
            for start in range(0, len(source_blocks), MAX_BLOCKS):
                blocks, targets = (x[start : start + MAX_BLOCKS] for x in (source_blocks, destination_blocks))
                pieces = self._cut(WRITE, blocks, memory.block_bytes)
                digests += await self._run(pieces, (lease_id, generation), targets)
        return digests

    async def push_moves(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        """Send our share, in one run for each kind of piece."""
        assert self._share is not None
        check_moves(moves, num_source=self._memory.num_blocks, num_destination=self._layout.num_blocks)
        alike: dict[Piece, list[int]] = {}
        for index, move in enumerate(moves):
            for piece in self._share.pieces(move.item):
                alike.setdefault(piece, []).append(index)
        digests = np.zeros(len(moves), "<u8")
        async with self._exchange(timeout_s):
            for piece, indices in alike.items():
                most = MAX_BLOCKS - RUN_WORDS * len(piece.runs)
                for start in range(0, len(indices), most):
                    part = indices[start : start + most]
                    pieces = self._cut(SHARE, [moves[index] for index in part], piece.num_bytes)
                    targets = [moves[index].block for index in part]
                    sums = await self._run(replace(pieces, share=piece), (lease_id, generation), targets)
                    digests[part] += np.frombuffer(sums, "<u8")
        return digests.tobytes()

    def _cut(self, kind: int, blocks: Sequence[Any], num_bytes: int) -> Pieces:
        per_piece = piece_blocks(self._memory, len(blocks), self._slot_bytes, num_bytes)
        if not per_piece:
            raise TransferError(f"a share of {num_bytes} bytes is more than a message of {self._slot_bytes}")
        parts = [blocks[at : at + per_piece] for at in range(0, len(blocks), per_piece)]
        return Pieces(kind, parts, per_piece, num_bytes)

    async def _run(self, pieces: Pieces, lease: tuple[int, int] = (0, 0), targets: Sequence[int] = ()) -> bytes:
        """Send one run: while a piece is on the wire the next ones are packed. Return the blocks' digests."""
        wire, digests, tag, parts = self._wire, b"", Tag(self._tag + 1), pieces.parts
        wire.hold()
        header = self._send_header(pieces, lease, targets)
        packing = deque([await self._pack(part, pieces.share) for part in parts[:PIECES_AHEAD]])
        answered = self._endpoint.tag_recv(self._answer_array, Tag(self._answers))
        for index, part in enumerate(parts):
            slot = packing.popleft()
            digests += await self._slots[slot].packed(wire) if part else b""
            self._send_slot(slot, (len(part) or pieces.most) * pieces.num_bytes, tag)
            if index + PIECES_AHEAD < len(parts):
                packing.append(await self._pack(parts[index + PIECES_AHEAD], pieces.share))
        await wire.end(self._endpoint, header)
        await wire.end(self._endpoint, answered)
        check_taken(self._answer)
        return digests

    async def _pack(self, blocks: Sequence[Any], share: Piece | None) -> int:
        """Begin to pack the next slot once its last message is sent. Return its number."""
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        if self._sent[slot] is not None:
            await self._wire.end(self._endpoint, self._sent[slot])
        if share is not None:
            self._slots[slot].pack_share(share, blocks, self._layout)
        elif blocks:
            self._slots[slot].pack(blocks)
        return slot

    def _send_slot(self, slot: int, num_bytes: int, tag: Tag) -> None:
        self._sent[slot] = self._endpoint.tag_send(self._slots[slot].array(num_bytes), tag)

    def _send_header(self, pieces: Pieces, lease: tuple[int, int], targets: Sequence[int]) -> Any:
        words, count = [*_words_of(pieces.share), *targets], len(targets) or len(pieces.parts)
        num_runs = 0 if pieces.share is None else len(pieces.share.runs)
        HEADER.pack_into(self._header.data, 0, *lease, count, pieces.most, pieces.kind, num_runs)
        self._ids[: len(words)] = words
        num_bytes = HEADER.size + 4 * IDS_PADDING * -(-len(words) // IDS_PADDING)
        if num_bytes not in self._headers:
            self._headers[num_bytes] = Array(self._header[:num_bytes])
        return self._endpoint.tag_send(self._headers[num_bytes], Tag(self._tag))

    @contextlib.asynccontextmanager
    async def _exchange(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold the link for one run, with a deadline. An interrupted run ends the endpoint: its messages would be out of step."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError as error:
            raise TransferError(f"the link was busy for {timeout_s:.1f} s") from error
        try:
            if self.closed:
                raise TransferError("the link is closed")
            async with asyncio.timeout_at(deadline):
                yield
        except TransferError:
            raise
        except BaseException as error:
            self._end()  # while the traceback keeps alive the buffers that UCX may write into
            if isinstance(error, Exception):
                raise TransferError(f"push failed: {type(error).__name__} {error}") from error
            raise
        finally:
            self._turn.release()

    async def close(self) -> None:
        """End the connection; a push in flight fails."""
        self._end()

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self._sent.clear()
            abort(self._endpoint)
            if self._slots:
                self._memory.keep(self._slots, self._memory.slot_bytes)


def _words_of(share: Piece | None) -> list[int]:
    """The words of a share's runs in a header."""
    runs = () if share is None else share.runs
    lanes = [(run.destination, run.num_bytes, LANE_BYTES * run.count, run.destination_step) for run in runs]
    return [number // LANE_BYTES for number in chain(*lanes)]


def check_taken(answer: bytearray) -> None:
    """Raise TransferError if the receiver dropped a run."""
    if answer[0] != TAKEN:
        raise TransferError("the receiver dropped the blocks: the lease is not valid any more")
