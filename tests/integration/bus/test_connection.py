"""A NATS server that is not there, has another release's streams, or goes away and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from unittest.mock import Mock

import nats
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamConfig

from common import subjects
from common.bus import NatsSettings, connect_bus
from common.errors import UnavailableError
from common.messages import (
    Cancel,
    Frame,
    Tokens,
    frame_decoder,
    worker_reply_decoder,
)
from common.wire import add_stream
from services.runtime.servers import run_nats
from tests.integration.bus.looks import PATIENT, a_job, some_jobs
from tests.integration.waiting import LIMIT_S, eventually
from tests.ports import own_port


async def test_a_stream_that_another_release_made_for_good_is_named_with_the_remedy(tmp_path: Path) -> None:
    async with run_nats(data_dir=tmp_path) as server, await nats.connect(server.url) as raw:
        await raw.jetstream().add_stream(name=subjects.JOBS_STREAM, subjects=["baton.jobs.*"], storage=StorageType.FILE)
        with pytest.raises(UnavailableError, match=f"nats stream rm {subjects.JOBS_STREAM}"):
            async with connect_bus(NatsSettings(url=server.url), name="test", limits=PATIENT):
                pass


async def test_a_stream_is_made_as_soon_as_its_folder_can_be(tmp_path: Path) -> None:
    """nats-server removes a deleted stream's folder later, and refuses to make it until then. A file stands for that folder."""
    async with run_nats(data_dir=tmp_path) as server, await nats.connect(server.url) as raw:
        jetstream = raw.jetstream()
        await jetstream.add_stream(name="other", subjects=["other"], storage=StorageType.FILE)
        [other] = tmp_path.rglob("streams/other")
        in_the_way = other.with_name("mine")
        in_the_way.touch()
        refused: list[BaseException] = []

        async def add(config: StreamConfig) -> None:
            try:
                await JetStreamContext.add_stream(jetstream, config)
            except nats.js.errors.ServerError as error:
                refused.append(error)
                in_the_way.unlink(missing_ok=True)  # the server may have cleared it
                raise

        await add_stream(Mock(add_stream=add), StreamConfig(name="mine", subjects=["mine"], storage=StorageType.FILE))
        assert len(refused) == 1
        assert (await jetstream.stream_info("mine")).config.storage == StorageType.FILE


async def test_connecting_to_nothing_says_where_it_tried_once_and_not_the_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = NatsSettings(url="nats://me:secret@127.0.0.1:1", connect_timeout_s=0.2)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1") as raised:
        async with connect_bus(settings, name="test"):
            pass
    assert "secret" not in raised.value.message
    assert [record.getMessage() for record in caplog.records] == ["nats.away"]


async def test_a_restart_of_nats_brings_subscriptions_streams_and_consumers_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        server = await first.enter_async_context(run_nats(data_dir=tmp_path, port=own_port()))
        try:
            bus = await stack.enter_async_context(connect_bus(NatsSettings(url=server.url), name="test"))
            await bus.subscribe("baton.frames.g", frame_decoder, frames.put_nowait)
            queue = await bus.jobs("w")
            await bus.publish_job("w", a_job("lost with the server's memory"))
        finally:
            server.process.kill()
            await first.aclose()

        async def is_disconnected() -> bool:
            return not bus.connected

        await eventually(is_disconnected)
        assert await queue.fetch(1, expires_s=0.05) == []
        with pytest.raises(UnavailableError):
            await bus.publish_job("w", a_job())
        with pytest.raises(UnavailableError):
            await bus.request("baton.worker.w", Cancel(request_id="r", attempt=1), worker_reply_decoder, timeout_s=60)
        await bus.publish("baton.frames.g", Frame(worker="stored-while-away", incarnation=1, tokens=[]))

        await stack.enter_async_context(run_nats(port=server.port, data_dir=tmp_path))
        async with asyncio.timeout(LIMIT_S):
            assert (await frames.get()).worker == "stored-while-away"
        await bus.publish_job("w", a_job("after"))
        assert [delivery.job.request_id for delivery in await some_jobs(queue)] == ["after"]
        assert bus.reconnects == 1
    said = [record.getMessage() for record in caplog.records if record.name == "baton.bus"]
    assert said[:3] == ["nats.away", "nats.back", "bus.reconnected"]


async def test_what_is_published_while_disconnected_is_bounded(tmp_path: Path) -> None:
    async with run_nats(data_dir=tmp_path) as server, connect_bus(NatsSettings(url=server.url), name="test") as bus:
        server.process.kill()

        async def is_disconnected() -> bool:
            return not bus.connected

        await eventually(is_disconnected)
        megabyte = Tokens(request_id="r", attempt=1, position=0, token_ids=bytes(1 << 20))
        frame = Frame(worker="w", incarnation=1, tokens=[megabyte])
        for _ in range(31):
            await bus.publish("baton.frames.g", frame)
        with pytest.raises(UnavailableError, match="OutboundBufferLimit"):
            await bus.publish("baton.frames.g", frame)
        # As asyncio of Python 3.12.1 and 3.13.0 does where a connection is lost.
        bus._client._transport.writelines = Mock(side_effect=TypeError("'NoneType' object is not callable"))
