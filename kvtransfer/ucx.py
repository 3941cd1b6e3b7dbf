"""Transport `ucx`: blocks as messages over UCX (TCP, shared memory, RDMA), between hosts or within one.

The Python binding (`ucxx`) has no one-sided access, so the receiver takes part: it takes a message only for blocks that
`expect` named, and drops it otherwise. That makes every late write harmless, and quarantine ends at once. One message
is one run of blocks, gathered into a staging buffer of bounded size; the receiver answers each, so that `push` returns
when the bytes are in place. UCX notices neither a hung peer nor a silent partition by itself: every wait for the rest
of a message has a deadline, after which the endpoint is dropped.

A message: a header of 64 bytes, the destination blocks (u32 each), the blocks' bytes; its answer: 8 bytes. The header's
token comes from the receiver's `Region`, so only who could read it on the bus may write. UCX itself neither encrypts
nor authenticates, and the binding listens on every interface: keep its ports inside the cluster's network.

Buffers outlive their requests: UCX writes into a buffer until its request ended, also when nobody awaits it any more.
So an endpoint is aborted while the failed wait's exception, whose traceback holds the buffers, is still at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import struct
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
os.environ.setdefault("UCX_TCP_USER_TIMEOUT", "3s")  # read by UCX when ucxx is loaded
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")

import ucxx

from common.messages import KVLayout, Region
from kvtransfer.transport import Link, TransferError, check_run
from kvtransfer.ucx_memory import PoolMemory, memory_of

log = logging.getLogger("baton.ucx")

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 10.0
MESSAGE_TIMEOUT_S = 10.0  # from a message's header to its end
ABORT_NS = 10**9  # longest wait for an endpoint to let go
_HEADER = struct.Struct("<8s16sQQIB19x")  # magic, token, lease, generation, number of blocks, kind
_MAGIC = b"BATON-1\0"
_WRITE, _PROBE = 1, 2
_TAKEN, _DROPPED = 1, 2


class UcxTransport:
    """Listens for writers and keeps one endpoint to each peer that this worker writes to."""

    name = "ucx"

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self._token = secrets.token_bytes(16)
        self._pool: PoolMemory | None = None
        self._listener: Any = None
        self._links: dict[tuple[str, str, int], UcxLink] = {}
        self._opening: dict[tuple[str, str, int], asyncio.Task[UcxLink]] = {}
        self._layout: KVLayout | None = None
        self._expected: dict[tuple[int, int], _Expected] = {}
        self.dropped_runs = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return zeroed plain memory: UCX needs nothing special of it."""
        return torch.zeros(shape, dtype=dtype, device=device)

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        self._pool, self._layout = memory_of(pool), layout
        self._listener = ucxx.create_listener(self._serve, port=0)
        address = {"host": self._host, "port": str(self._listener.port), "token": self._token.hex()}
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address=address)

    async def connect(self, region: Region) -> Link:
        if region.transport != self.name:
            raise TransferError(f"the peer uses transport {region.transport}, this worker {self.name}")
        if self._pool is None or self._layout is None:
            raise TransferError("this transport has no pool")
        if not self._layout.compatible_with(region.layout):
            raise TransferError("the peer's KV layout is another one")
        self._links = {key: link for key, link in self._links.items() if not link.closed}
        key = (region.address.get("host", ""), region.address.get("port", ""), region.incarnation)
        if key in self._links:
            return self._links[key]
        if key not in self._opening:  # once, however many wait for it; a peer that doesn't answer delays no other
            self._opening[key] = asyncio.create_task(UcxLink.open(self._pool, region))
            self._opening[key].add_done_callback(lambda opening: self._opened(key, opening))
        return await asyncio.shield(self._opening[key])

    def _opened(self, key: tuple[str, str, int], opening: asyncio.Task[UcxLink]) -> None:
        del self._opening[key]
        if not opening.cancelled() and opening.exception() is None:
            self._links[key] = opening.result()

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        self._expected[lease_id, generation] = _Expected(blocks)

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        expected = self._expected.get((lease_id, generation))
        if expected is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await expected.complete.wait()
        return expected.complete.is_set()

    def forget(self, lease_id: int, generation: int) -> None:
        self._expected.pop((lease_id, generation), None)

    def writer_gone(self, writer: Region | None) -> bool:
        """Always: after `forget` nothing of any writer lands."""
        return True

    async def close(self) -> None:
        for opening in list(self._opening.values()):
            opening.cancel()
        for link in self._links.values():
            await link.close()
        self._links.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- receiving -------------------------------------------------------------------------------------------------

    async def _serve(self, endpoint: Any) -> None:
        """Take messages from one writer until it is gone or sends what makes no sense."""
        try:
            while await self._serve_message(endpoint):
                pass
            _abort(endpoint)
        except Exception as error:
            log.debug("ucx.writer_left", extra={"error": str(error)[:200]})
            _abort(endpoint)
        except asyncio.CancelledError:
            _abort(endpoint)
            raise

    async def _serve_message(self, endpoint: Any) -> bool:
        """Take and answer one message. False for one that is not of our protocol: the connection must end."""
        header = np.empty(_HEADER.size, np.uint8)
        await endpoint.recv(header)
        magic, token, lease_id, generation, count, kind = _HEADER.unpack(header.tobytes())
        if magic != _MAGIC or not secrets.compare_digest(token, self._token):
            log.warning("ucx.stranger")
            return False
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            if kind == _PROBE:
                await endpoint.recv(self._memory.buffer(probe_bytes(self._memory)))
                taken = True
            elif kind == _WRITE and 0 < count <= _blocks_in_message(self._memory):
                taken = await self._take(endpoint, lease_id, generation, count)
            else:
                log.warning("ucx.bad_header")
                return False
            await endpoint.send(_answer(_TAKEN if taken else _DROPPED))
        return True

    async def _take(self, endpoint: Any, lease_id: int, generation: int, count: int) -> bool:
        """Receive one run and scatter it, as far as it is expected *at that moment*. False if it is not."""
        memory = self._memory
        blocks = np.empty(count, np.uint32)
        await endpoint.recv(blocks)
        staging = memory.buffer(count * memory.block_bytes)
        await endpoint.recv(staging)
        at_once = max(1, memory.turn_bytes // memory.block_bytes)
        for start in range(0, count, at_once):
            piece = blocks[start : start + at_once].tolist()
            expected = self._expected.get((lease_id, generation))
            if expected is None or not expected.covers(piece):
                self.dropped_runs += 1
                return False
            memory.scatter(staging, start, piece)  # no await since the check: `forget` can't come between
            expected.took(piece)
            await asyncio.sleep(0)
        return True

    @property
    def _memory(self) -> PoolMemory:
        assert self._pool is not None  # nobody serves or is served before `open`
        return self._pool


class UcxLink:
    """An endpoint to one peer's pool. One run is on its way at a time."""

    def __init__(self, endpoint: Any, pool: PoolMemory, region: Region) -> None:
        self._endpoint = endpoint
        self._pool = pool
        self._num_blocks = region.layout.num_blocks
        self._token = bytes.fromhex(region.address.get("token", ""))
        self._turn = asyncio.Lock()
        self.bandwidth = 0.0
        self.closed = False

    @classmethod
    async def open(cls, pool: PoolMemory, region: Region) -> UcxLink:
        """Connect and measure the link once. Raises TransferError."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                endpoint = await ucxx.create_endpoint(
                    region.address["host"], int(region.address["port"]), connect_timeout=CONNECT_TIMEOUT_S
                )
            link = cls(endpoint, pool, region)
            await link._measure()
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"no UCX connection: {type(error).__name__} {error}") from error
        return link

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        check_run(source_blocks, destination_blocks, num_source=self._pool.num_blocks, num_destination=self._num_blocks)
        per_message = _blocks_in_message(self._pool)
        digests = b""
        async with self._exchange(timeout_s):
            for start in range(0, len(source_blocks), per_message):
                staging, digest = await asyncio.to_thread(self._pool.gather, source_blocks[start : start + per_message])
                blocks = np.asarray(destination_blocks[start : start + per_message], np.uint32)
                await self._send(_WRITE, lease_id, generation, blocks, staging)
                digests += digest
        return digests

    async def _send(
        self,
        kind: int,
        lease_id: int,
        generation: int,
        blocks: npt.NDArray[np.uint32],
        payload: Any,
    ) -> None:
        header = _HEADER.pack(_MAGIC, self._token, lease_id, generation, len(blocks), kind)
        await self._endpoint.send(np.frombuffer(bytearray(header), np.uint8))
        if kind == _WRITE:
            await self._endpoint.send(blocks)
        await self._endpoint.send(payload)
        answer = np.empty(8, np.uint8)
        await self._endpoint.recv(answer)
        if answer[0] != _TAKEN:
            raise TransferError("the receiver dropped the blocks: the lease is not valid any more")

    @contextlib.asynccontextmanager
    async def _exchange(self, timeout_s: float) -> AsyncIterator[None]:
        """One run: its turn, its deadline. What breaks it off ends the endpoint: messages would be out of step."""
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
            self.closed = True
            _abort(self._endpoint)
            if isinstance(error, Exception):
                raise TransferError(f"push failed: {type(error).__name__} {error}") from error
            raise
        finally:
            self._turn.release()

    async def _measure(self) -> None:
        async with self._exchange(PROBE_TIMEOUT_S):
            size, none = probe_bytes(self._pool), np.empty(0, np.uint32)
            payload = self._pool.buffer(size)
            await self._send(_PROBE, 0, 0, none, payload)  # the first one pays for the connection's set-up
            started = time.perf_counter()
            await self._send(_PROBE, 0, 0, none, payload)
            self.bandwidth = size / (time.perf_counter() - started)

    async def close(self) -> None:
        """End the connection; a push that is on its way fails."""
        if not self.closed:
            self.closed = True
            _abort(self._endpoint)


class _Expected:
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


def _blocks_in_message(memory: PoolMemory) -> int:
    """Most blocks of one message: what fits into the staging buffer, one at least."""
    return max(1, memory.message_bytes // memory.block_bytes)


def probe_bytes(memory: PoolMemory) -> int:
    """Size of the message that measures a link; both ends agree, having the same layout on the same kind of device."""
    return memory.message_bytes // 8


def _abort(endpoint: Any) -> None:
    """Drop an endpoint with all that is in flight on it. Blocks for `ABORT_NS` at most."""
    with contextlib.suppress(Exception):
        endpoint.abort(period=ABORT_NS)


def _answer(status: int) -> npt.NDArray[np.uint8]:
    answer = np.zeros(8, np.uint8)
    answer[0] = status
    return answer
