"""Transport `ucx`: blocks as messages over UCX (TCP, shared memory, RDMA), between hosts or within one.

The Python binding (`ucxx`) has no one-sided access, so the receiver takes part: it takes a message only for blocks that `expect`
named, and drops it otherwise. That makes every late write harmless, and quarantine ends at once. One message is one run of
blocks, gathered into a staging buffer of bounded size; the receiver answers each, so that `push` returns when the bytes are
in place. UCX notices neither a hung peer nor a silent partition by itself: every wait here has a deadline, after which the
endpoint is dropped.

A message: a header of 64 bytes, the destination blocks (u32 each), the blocks' bytes; its answer: 8 bytes. The header's token
comes from the receiver's `Region`, so only who could read it on the bus may write. UCX itself neither encrypts nor
authenticates: keep its port inside the cluster's network.
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

import ucxx  # noqa: E402

from common.messages import KVLayout, Region  # noqa: E402
from kvtransfer.digest import lane_digest, lane_view, multipliers  # noqa: E402
from kvtransfer.transport import Link, TransferError  # noqa: E402

log = logging.getLogger("baton.ucx")

STAGING_BYTES = 32 << 20  # most bytes of one message
PROBE_BYTES = 4 << 20
CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 10.0
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
        self._pool: npt.NDArray[np.unsignedinteger] | None = None
        self._listener: Any = None
        self._links: dict[tuple[str, str, int], UcxLink] = {}
        self._connecting = asyncio.Lock()
        self._expected: dict[tuple[int, int], _Expected] = {}
        self.dropped_runs = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return zeroed plain memory: UCX needs nothing special of it."""
        return torch.zeros(shape, dtype=dtype, device=device)

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        if pool.device.type != "cpu":
            raise ValueError("transport ucx moves host memory so far; run the worker on the CPU or use another transport")
        self._pool = lane_view(pool)
        self._listener = ucxx.create_listener(self._serve, port=0)
        address = {"host": self._host, "port": str(self._listener.port), "token": self._token.hex()}
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address=address)

    async def connect(self, region: Region) -> Link:
        if region.transport != self.name:
            raise TransferError(f"the peer uses transport {region.transport}, this worker {self.name}")
        if self._pool is None:
            raise TransferError("this transport has no pool")
        host, port = region.address.get("host", ""), region.address.get("port", "")
        key = (host, port, region.incarnation)
        async with self._connecting:
            link = self._links.get(key)
            if link is None or link.closed:
                link = self._links[key] = await UcxLink.open(self._pool, region)
            return link

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
        for link in self._links.values():
            await link.close()
        self._links.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- receiving -------------------------------------------------------------------------------------------------

    async def _serve(self, endpoint: Any) -> None:
        """Take messages from one writer until it is gone or sends what makes no sense."""
        header = np.empty(_HEADER.size, np.uint8)
        try:
            while True:
                await endpoint.recv(header)
                magic, token, lease_id, generation, count, kind = _HEADER.unpack(header.tobytes())
                if magic != _MAGIC or not secrets.compare_digest(token, self._token):
                    log.warning("ucx.stranger")
                    break
                if kind == _PROBE:
                    await endpoint.recv(np.empty(PROBE_BYTES, np.uint8))
                    await endpoint.send(_answer(_TAKEN))
                    continue
                status = await self._take(endpoint, lease_id, generation, count)
                if status is None:
                    break
                await endpoint.send(_answer(status))
        except Exception as error:  # noqa: BLE001 - ucxx has no common base class for its errors
            log.debug("ucx.writer_left", extra={"error": str(error)[:200]})
        finally:
            with contextlib.suppress(Exception):
                endpoint.abort()

    async def _take(self, endpoint: Any, lease_id: int, generation: int, count: int) -> int | None:
        """Receive one run; scatter it if it is expected *when it is here*. None: it can't be a run of ours."""
        pool = self._pool
        assert pool is not None
        if not 0 < count * pool[0].nbytes <= max(STAGING_BYTES, pool[0].nbytes):
            return None
        blocks = np.empty(count, np.uint32)
        await endpoint.recv(blocks)
        staging = np.empty((count, pool.shape[1]), pool.dtype)
        await endpoint.recv(staging.reshape(-1).view(np.uint8))
        expected = self._expected.get((lease_id, generation))
        if expected is None or not expected.covers(blocks.tolist()):
            self.dropped_runs += 1
            return _DROPPED
        pool[blocks] = staging  # on the loop: `forget` can't come between the check and the write
        expected.took(blocks.tolist())
        return _TAKEN


class UcxLink:
    """An endpoint to one peer's pool. One run is on its way at a time."""

    def __init__(self, endpoint: Any, pool: npt.NDArray[np.unsignedinteger], region: Region) -> None:
        self._endpoint = endpoint
        self._pool = pool
        self._factors = multipliers(pool.shape[1])
        self._num_blocks = region.layout.num_blocks
        self._token = bytes.fromhex(region.address.get("token", ""))
        self._turn = asyncio.Lock()
        self.bandwidth = 0.0
        self.closed = False

    @classmethod
    async def open(cls, pool: npt.NDArray[np.unsignedinteger], region: Region) -> UcxLink:
        """Connect and measure the link once. Raises TransferError."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                endpoint = await ucxx.create_endpoint(
                    region.address["host"], int(region.address["port"]), connect_timeout=CONNECT_TIMEOUT_S
                )
            link = cls(endpoint, pool, region)
            if region.layout.block_bytes != pool[0].nbytes:
                raise TransferError("the peer's blocks have another size")
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
        if len(source_blocks) != len(destination_blocks):
            raise TransferError("as many destinations as sources are needed")
        if any(not 0 <= block < self._num_blocks for block in destination_blocks):
            raise TransferError("a destination block is outside the peer's pool")
        per_message = max(1, STAGING_BYTES // self._pool[0].nbytes)
        digests = b""
        async with self._exchange(timeout_s):
            for start in range(0, len(source_blocks), per_message):
                staging = self._pool[np.asarray(source_blocks[start : start + per_message])]
                blocks = np.asarray(destination_blocks[start : start + per_message], np.uint32)
                await self._send(_WRITE, lease_id, generation, blocks, staging)
                digests += self._digests(staging)
        return digests

    def _digests(self, staging: npt.NDArray[np.unsignedinteger]) -> bytes:
        return np.array([lane_digest(lanes, self._factors) for lanes in staging], dtype="<u8").tobytes()

    async def _send(
        self,
        kind: int,
        lease_id: int,
        generation: int,
        blocks: npt.NDArray[np.uint32],
        payload: npt.NDArray[Any],
    ) -> None:
        header = _HEADER.pack(_MAGIC, self._token, lease_id, generation, len(blocks), kind)
        await self._endpoint.send(np.frombuffer(bytearray(header), np.uint8))
        if kind == _WRITE:
            await self._endpoint.send(blocks)
        await self._endpoint.send(payload.reshape(-1).view(np.uint8))
        answer = np.empty(8, np.uint8)
        await self._endpoint.recv(answer)
        if answer[0] != _TAKEN:
            raise TransferError("the receiver dropped the blocks: the lease is not valid any more")

    @contextlib.asynccontextmanager
    async def _exchange(self, timeout_s: float) -> AsyncIterator[None]:
        """One run: its turn, its deadline; whatever breaks it off also ends the endpoint, since messages would be out of step."""
        async with self._turn:
            if self.closed:
                raise TransferError("the link is closed")
            try:
                async with asyncio.timeout(timeout_s):
                    yield
            except TransferError:
                raise
            except BaseException as error:
                self._abort()
                if isinstance(error, Exception):
                    raise TransferError(f"push failed: {type(error).__name__} {error}") from error
                raise

    async def _measure(self) -> None:
        async with self._exchange(PROBE_TIMEOUT_S):
            payload, none = np.zeros(PROBE_BYTES, np.uint8), np.empty(0, np.uint32)
            await self._send(_PROBE, 0, 0, none, payload)  # the first one pays for the connection's set-up
            started = time.perf_counter()
            await self._send(_PROBE, 0, 0, none, payload)
            self.bandwidth = PROBE_BYTES / (time.perf_counter() - started)

    def _abort(self) -> None:
        self.closed = True
        with contextlib.suppress(Exception):
            self._endpoint.abort()

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1.0):
                    await self._endpoint.close()


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


def _answer(status: int) -> npt.NDArray[np.uint8]:
    answer = np.zeros(8, np.uint8)
    answer[0] = status
    return answer
