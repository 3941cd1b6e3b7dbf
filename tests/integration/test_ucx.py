"""What only `ucx` has: its protocol, and its own event loop's worker."""

# ruff: noqa: E402 (these imports fail where ucxx is missing)

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.needs import needs

needs("ucxx")

from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.transport import TransferError
from kvtransfer.ucx.memory import HostSlot
from kvtransfer.ucx.protocol import HEADER, HELLO, MAGIC, PROBE, SHARE, WRITE
from kvtransfer.ucx.send import UcxLink
from kvtransfer.ucx.transport import UcxTransport
from kvtransfer.ucx.wire import Array, Tag, Wire
from tests.integration.kv_peers import BOUND_S, LARGE, SMALL, Writer, push, start_writer

TURNS = 300  # of an idle loop in half a second: far above the looks of two workers, far below what a busy loop makes


@asynccontextmanager
async def start_pair(layout: Any = SMALL) -> AsyncIterator[tuple[Writer, Writer, UcxLink]]:
    """A writer, a receiver and their link, both in this process."""
    async with start_writer("ucx", layout) as receiver, start_writer("ucx", layout) as writer:
        receiver.pool.zero_()
        link = await writer.transport.connect(receiver.region)
        assert isinstance(link, UcxLink)
        yield writer, receiver, link


async def test_who_waits_for_a_writer_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_pair() as (_, receiver, link):
        receiver.transport.expect(1, 7, [3])
        await push(link, [0], [3])
        loop, turns = asyncio.get_running_loop(), 0
        once = loop._run_once  # type: ignore[attr-defined]

        def counted() -> None:
            nonlocal turns
            turns += 1
            once()

        monkeypatch.setattr(loop, "_run_once", counted)
        await asyncio.sleep(0.5)

        assert turns < TURNS
        monkeypatch.undo()
        receiver.transport.expect(1, 8, [4])
        await push(link, [0], [4], generation=8)  # it wakes up
        assert receiver.bytes_of([4]) == receiver.bytes_of([3])


async def test_a_lease_forgotten_between_two_pieces_refuses_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_pair(LARGE) as (writer, receiver, link):
        receiver.transport.expect(1, 7, [5, 6, 7, 8])
        second = link._slots[(link._next + 1) % len(link._slots)]
        packed = second.packed

        async def late(wire: Wire) -> bytes:
            async with asyncio.timeout(BOUND_S):
                while receiver.bytes_of([5, 6]) != writer.bytes_of([0, 1]):  # two blocks are a piece
                    await asyncio.sleep(0.001)
            receiver.transport.forget(1, 7)
            return await packed(wire)

        monkeypatch.setattr(second, "packed", late)
        with pytest.raises(TransferError, match="not valid any more"):
            await push(link, [0, 1, 2, 3], [5, 6, 7, 8])
        monkeypatch.undo()

        assert receiver.bytes_of([5, 6]) == writer.bytes_of([0, 1])
        assert not any(receiver.bytes_of([7, 8]))
        receiver.transport.expect(2, 7, [7])
        await push(link, [3], [7], lease=2)  # the link is still good, and its slots in step
        assert receiver.bytes_of([7]) == writer.bytes_of([3])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[HostSlot, list[int]]:
    """What is being unpacked. `HostSlot` does it at once; here, as on a GPU, it is over when it is waited for."""
    begun: dict[HostSlot, list[int]] = {}
    at_once = HostSlot.unpack

    def end(slot: HostSlot, meanwhile: object) -> None:
        if slot in begun:
            at_once(slot, begun.pop(slot))

    monkeypatch.setattr(HostSlot, "unpack", lambda slot, blocks, runs: begun.update({slot: blocks}))
    monkeypatch.setattr(HostSlot, "unpacked", end)
    return begun


@pytest.mark.parametrize("hold_s", [0.0, 0.0005])
async def test_nothing_is_being_unpacked_while_anything_else_runs(
    hold_s: float, begun: dict[HostSlot, list[int]]
) -> None:
    """Whoever forgets a lease may use its blocks at once."""
    async with start_pair(LARGE) as (writer, receiver, link):
        receiver.transport._wire._hold_s = hold_s  # as on a GPU: the loop's thread is held while blocks move
        receiver.transport.expect(1, 7, range(8))
        pushing, turns = asyncio.create_task(push(link, list(range(8, 16)), list(range(8)))), 0
        while not pushing.done():
            await asyncio.sleep(0)
            turns += 1
            assert not begun
        await pushing
        assert turns > 1
        assert receiver.bytes_of(list(range(8))) == writer.bytes_of(list(range(8, 16)))


async def test_what_is_being_unpacked_when_the_writer_goes_is_over_when_the_connection_is(
    begun: dict[HostSlot, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_pair(LARGE) as (_, receiver, link):
        wire = receiver.transport._wire
        end, waits = wire.end, []

        async def gone(endpoint: Any, request: Any, **options: Any) -> None:
            waits.append(len(begun))
            if len(waits) > 1:
                raise ConnectionError("the peer is gone")
            await end(endpoint, request, **options)

        monkeypatch.setattr(wire, "end", gone)
        receiver.transport.expect(1, 7, range(8))
        with pytest.raises(TransferError):
            await push(link, list(range(8, 16)), list(range(8)))
        assert waits == [0, 1]
        assert not begun


@pytest.mark.parametrize(
    ("count", "per_piece", "kind", "runs"),
    [
        (1, 1, 4, []),
        (0, 1, WRITE, []),
        (4097, 1, WRITE, []),
        (1, 0, WRITE, []),
        (1, 1 << 20, WRITE, []),
        (1 << 31, 1, PROBE, []),
        (1, 1, SHARE, []),
        (1, 1, SHARE, [0, 0, 1, 0]),
        (1, 1, SHARE, [0, 4, 0, 0]),
        (1, 1, SHARE, [2045, 4, 1, 4]),
        (1, 1, SHARE, [0, 4, 3, 1023]),
        (1, 1, SHARE, [2**32 - 1, 4, 1, 4]),
        (4093, 1, SHARE, [0, 4, 1, 4]),
        (1, 1 << 20, SHARE, [0, 4, 1, 4]),
    ],
)
async def test_a_header_that_makes_no_sense_ends_the_link(
    count: int, per_piece: int, kind: int, runs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async with start_pair() as (_, receiver, link):
        receiver.transport.expect(1, 7, [3])
        words = struct.pack(f"<{len(runs) + 1}I", *runs, 3)
        header = bytearray(HEADER.pack(1, 7, count, per_piece, kind, len(runs) // 4) + words)
        with caplog.at_level(logging.WARNING, "baton.ucx"):
            sent = link._endpoint.tag_send(Array(header), Tag(link._tag))
            await link._wire.end(link._endpoint, sent)
            with pytest.raises(TransferError):
                await push(link, [0], [3])

        assert "ucx.bad_header" in caplog.messages
        assert not any(receiver.bytes_of([3]))


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (lambda token: HELLO.pack(b"BATON-9\0", token, 1), "ucx.unknown_protocol"),
        (lambda _: HELLO.pack(MAGIC, bytes(16), 1), "ucx.stranger"),
    ],
)
async def test_a_writer_is_turned_away_with_a_reason(hello: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    async with start_pair() as (writer, receiver, _):
        assert isinstance(writer.transport, UcxTransport)
        wire = writer.transport._wire
        assert wire is not None
        endpoint = wire.connect("127.0.0.1", int(receiver.region.address["port"]))
        message, welcome = hello(bytes.fromhex(receiver.region.address["token"])), bytearray(256)
        with caplog.at_level(logging.WARNING, "baton.ucx"):
            await wire.end(endpoint, endpoint.stream_send(Array(message)))
            async with asyncio.timeout(BOUND_S):
                with pytest.raises(Exception):  # noqa: B017 — UCX's or ours: the connection is closed
                    await wire.end(endpoint, endpoint.stream_recv(Array(welcome)))
        assert said in caplog.messages


@pytest.mark.parametrize("protocol", ["1", "3"])
async def test_a_peer_of_another_protocol_is_refused_with_the_remedy(protocol: str) -> None:
    async with start_writer("ucx") as receiver, start_writer("ucx") as writer:
        other = msgspec.structs.replace(receiver.region, address=receiver.region.address | {"protocol": protocol})
        with pytest.raises(TransferError, match="upgrade one release at a time"):
            await writer.transport.connect(other)


async def test_the_listener_hears_the_configured_address_alone() -> None:
    """Another address of the same machine finds nobody; the configured one is found all the same."""
    async with start_writer("ucx") as receiver:
        port = int(receiver.region.address["port"])
        assert (await is_heard("127.0.0.1", port), await is_heard("127.0.0.2", port, within_s=1)) == (True, False)


async def test_a_host_that_is_not_this_machine_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Behind a translated address there is none to listen at: the listener then hears all, and says so."""
    transport = UcxTransport(host="192.0.2.77")
    try:
        pool = transport.allocate(pool_shape(SMALL), pool_dtype(SMALL), "cpu")
        region = await transport.open(pool, SMALL, 1)
        assert await is_heard("127.0.0.2", int(region.address["port"]))
        assert "ucx.listens_everywhere" in caplog.messages
    finally:
        await transport.close()


async def is_heard(host: str, port: int, *, within_s: float = BOUND_S) -> bool:
    """Whether a connection is made: what is not heard is not refused, either."""
    try:
        async with asyncio.timeout(within_s):
            _, stream = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    stream.close()
    return True
