"""A server that goes away, hangs, or loses its functions."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from common.errors import UnavailableError
from common.store import BREAKER_ERRORS, RedisSettings, connect_store
from gateway.placement.ledger import Ledger, function_libraries
from services.runtime.servers import run_redis
from tests.integration.conftest import patient_ledger
from tests.integration.fleet import TTL_MS, FleetStore, a_request, a_worker, patient, release, two_and_two
from tests.integration.waiting import LIMIT_S, eventually
from tests.ports import own_port


@pytest.mark.parametrize("flush", ["FUNCTION FLUSH", "FLUSHALL", "SCRIPT FLUSH"])
async def test_the_library_is_loaded_again_when_it_is_gone(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis, flush: str
) -> None:
    await raw.execute_command(*flush.split())
    await two_and_two(store)
    assert (await ledger.place(a_request())).prefill == "p0"


async def test_a_killed_redis_is_unavailable_at_once_and_back_after_its_restart(tmp_path: Path) -> None:
    async with run_redis(data_dir=tmp_path, port=own_port()) as server, connect_here(patient(server.url)) as store:
        ledger = patient_ledger(store)
        await store.register(a_worker("w", "decode"))
        server.process.kill()
        await server.process.wait()
        async with asyncio.timeout(10.0):  # the client's own retries would take many seconds
            for _ in range(BREAKER_ERRORS + 20):
                with pytest.raises(UnavailableError):
                    await ledger.place(a_request())
        async with run_redis(port=server.port, data_dir=tmp_path):
            assert await eventually(lambda: registered_as_unknown(store))
            assert (await ledger.place(a_request())).prefill == "w"


async def test_a_hung_redis_is_unavailable_after_the_time_out_and_answers_are_not_mixed_up_later(
    tmp_path: Path,
) -> None:
    async with run_redis(data_dir=tmp_path) as server:
        async with connect_here(patient(server.url)) as store:
            ledger = Ledger(store, place_timeout_s=0.05, timeout_s=LIMIT_S)
            await store.register(a_worker("w", "decode"), ttl_ms=TTL_MS)
            server.process.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(LIMIT_S / 2):
                    with pytest.raises(UnavailableError, match="TimeoutError"):
                        await ledger.place(a_request())
            finally:
                server.process.send_signal(signal.SIGCONT)
            await release(ledger, "request", 1, stage="all")  # it may have been placed after all
            assert await ledger.charged("w", "decode") == 0


async def test_a_store_without_redis_at_first_works_once_there_is_one(tmp_path: Path) -> None:
    port = own_port()
    async with connect_here(RedisSettings(url=f"redis://127.0.0.1:{port}")) as store:
        with pytest.raises(UnavailableError):
            await store.register(a_worker("w", "decode"))
        async with run_redis(port=port, data_dir=tmp_path):
            assert await eventually(lambda: registered_as_unknown(store))


async def test_who_brings_no_functions_waits_for_a_gateway_that_does(tmp_path: Path) -> None:
    async with run_redis(data_dir=tmp_path) as server, connect_store(patient(server.url)) as worker:
        with pytest.raises(UnavailableError, match="start a gateway, it installs them"):
            await patient_ledger(worker).place(a_request())
        async with connect_here(patient(server.url)) as gateway:
            await gateway.register(a_worker("w", "decode"), ttl_ms=TTL_MS)
            assert (await patient_ledger(worker).place(a_request())).prefill == "w"


@contextlib.asynccontextmanager
async def connect_here(settings: RedisSettings) -> AsyncIterator[FleetStore]:
    """As a gateway does."""
    async with connect_store(settings, libraries=function_libraries()) as store:
        yield FleetStore(store)


async def registered_as_unknown(store: FleetStore) -> bool:
    try:
        return await store.register(a_worker("w", "decode"), ttl_ms=TTL_MS)
    except UnavailableError:
        return False  # the breaker is open for a second
