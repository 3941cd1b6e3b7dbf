"""Transport `ucx`: blocks as messages over UCX (TCP, shared memory, RDMA, NVLink), between hosts or within one.

The Python binding (`ucxx`) has no one-sided access: the receiver unpacks a message only for blocks that `expect` named, and
drops it otherwise. So late writes are harmless, and quarantine ends at once. A run travels in pieces: while one is on the
wire the next two are packed and the one before unpacked. The receiver answers once, so `push` returns when the bytes are
in place. UCX notices neither a hung peer nor a silent partition: each wait within a run has a deadline, after which the
endpoint is dropped.

A connecting writer shows the token from the receiver's `Region`, which only workers are told; tags in the answers can't be
guessed. A receive is then posted for each slot, so no piece waits for a credit (`kvtransfer.ucx.protocol`). UCX neither encrypts
nor authenticates: keep its ports inside the cluster's network. The listener hears one address (`kvtransfer.ucx.listening`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import torch

from common.messages import KVLayout, Region
from kvtransfer.cuda.driver import use_device
from kvtransfer.liveness import host as this_host
from kvtransfer.shares import Share
from kvtransfer.transport import Link, ShareLink, TransferError, check_whole, plan_to
from kvtransfer.ucx.listening import hear_only, own_address
from kvtransfer.ucx.memory import PoolMemory, memory_of
from kvtransfer.ucx.protocol import CONNECT_TIMEOUT_S, PROTOCOL
from kvtransfer.ucx.receive import Door, Expected, Incoming
from kvtransfer.ucx.send import UcxLink
from kvtransfer.ucx.wire import Wire, abort

log = logging.getLogger("baton.ucx")

Peer = tuple[str, str, int, bool]  # host, port, incarnation, and if the link takes shares
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class UcxTransport:
    """Listens for writers and keeps one endpoint to each peer that this worker writes to."""

    name = "ucx"

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self._token = secrets.token_bytes(16)
        self._pool: PoolMemory | None = None
        self._wire: Wire | None = None
        self._listener: Any = None
        self._links: dict[Peer, UcxLink] = {}
        self._opening: dict[Peer, asyncio.Task[UcxLink]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._layout: KVLayout | None = None
        self._expected: dict[tuple[int, int], Expected] = {}

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return zeroed plain memory: UCX needs nothing special."""
        return torch.zeros(shape, dtype=dtype, device=device)

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        self._pool, self._layout = await asyncio.to_thread(memory_of, pool, layout), layout
        if pool.is_cuda:
            use_device(pool.device.index or 0)  # this thread drives UCX
        at = await asyncio.to_thread(own_address, self._host)
        self._wire = Wire(hold_s=self._pool.hold_s, loopback_only=at is not None and at.is_loopback)
        self._listener = self._wire.listen(self._accept)
        if at is None or not hear_only(self._listener.port, at):
            extra = {"transport_host": self._host, "remedy": "give --transport ucx:HOST an address of this machine"}
            log.warning("ucx.listens_everywhere", extra=extra)
        address = {
            "host": self._host,
            "port": str(self._listener.port),
            "token": self._token.hex(),
            "protocol": PROTOCOL,
            "shares": "1",
            "reach": this_host() if self._host in LOOPBACK else "",
        }
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address=address)

    async def connect(self, region: Region) -> Link:
        check_whole(plan_to(region, transport=self.name, layout=self._layout), transport=self.name)
        return await self._connect(region, None)

    async def connect_share(self, region: Region, share: Share) -> ShareLink:
        if not region.address.get("shares"):
            raise TransferError(
                "the peer's release takes no shares of blocks there: run one release, or give both one width"
            )
        return await self._connect(region, share)

    async def _connect(self, region: Region, share: Share | None) -> UcxLink:
        if self._pool is None or self._wire is None:
            raise TransferError("this transport is closed")
        check_protocol(region)
        self._links = {key: link for key, link in self._links.items() if not link.closed}
        host, port = region.address.get("host", ""), region.address.get("port", "")
        key = (host, port, region.incarnation, share is not None)
        if key in self._links:
            return self._links[key]
        if key not in self._opening:  # all callers share it, so a silent peer delays no other
            self._opening[key] = asyncio.create_task(UcxLink.open(self._wire, self._pool, region, share))
            self._opening[key].add_done_callback(lambda opening: self._opened(key, opening))
        return await asyncio.shield(self._opening[key])

    def _opened(self, key: Peer, opening: asyncio.Task[UcxLink]) -> None:
        del self._opening[key]
        if not opening.cancelled() and opening.exception() is None:
            self._links[key] = opening.result()

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        self._expected[lease_id, generation] = Expected(blocks)

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
        """Return True: after `forget` a writer's blocks are rejected."""
        return True

    async def close(self) -> None:
        for opening in list(self._opening.values()):
            opening.cancel()
        for link in self._links.values():
            await link.close()
        self._links.clear()
        self._listener = None
        for serving in self._serving:
            serving.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _accept(self, endpoint: Any) -> None:
        nobodys = contextvars.Context()  # an empty context, not that of the request that drives UCX now
        serving = asyncio.get_running_loop().create_task(self._serve(endpoint), context=nobodys)
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, endpoint: Any) -> None:
        """Receive runs from one writer until it disconnects or violates the protocol."""
        assert self._wire is not None
        try:
            incoming = await self._greet(endpoint)
            if incoming is not None:
                try:
                    await incoming.serve()
                finally:  # while the traceback keeps alive the buffers that UCX may write into
                    incoming.end()
        except MemoryError as error:
            log.warning("ucx.no_memory", extra={"error": str(error)[:200]})
        except Exception as error:
            log.debug("ucx.writer_left", extra={"error": str(error)[:200]})

    async def _greet(self, endpoint: Any) -> Incoming | None:
        """Return the writer's connection, or None after rejecting an unknown one."""
        assert self._wire is not None
        assert self._pool is not None
        door, is_welcome = Door(self._wire, endpoint), False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                is_welcome = await door.greet(self._token)
        finally:
            if not is_welcome:
                abort(endpoint)
        return Incoming(self._wire, self._pool, door, self._expected) if is_welcome else None


def check_protocol(region: Region) -> None:
    """Raise TransferError for a peer with another protocol."""
    protocol = region.address.get("protocol", "1")
    if protocol != PROTOCOL:
        raise TransferError(
            f"the peer speaks ucx protocol {protocol}, this worker {PROTOCOL}: upgrade one release at a time"
        )
