"""Two processes with one worker's name: it gets no work while both beat, and no request is blamed or lost for it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.request.state import Phase
from tests.unit.gateway.lifecycle.conftest import FakeWorker, Gateway

BOTH_BEAT_S = 1.3  # each twice


async def twins(gateway: Gateway) -> tuple[FakeWorker, FakeWorker]:
    """Two called d0, heard by turns."""
    older, younger = gateway.workers["d0"], await gateway.worker("d0", "decode", incarnation=2)
    await asyncio.sleep(BOTH_BEAT_S)
    return older, younger


async def test_streams_leave_the_name_once_and_nobody_counts_as_dead(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.fleet()
    other = await gateway.worker("d1", "decode")
    streams = [await gateway.decoding(f"r{number}") for number in range(4)]
    await twins(gateway)
    await asyncio.sleep(5 * BOTH_BEAT_S)
    assert gateway.peers.contested == ["d0"]
    assert [record.__dict__["worker"] for record in caplog.records if record.msg == "peer.contested"] == ["d0"]
    for stream in streams:
        state = stream.state
        assert (state.attempt, state.phase, state.candidates) == (2, Phase.QUEUED, ["d1"])
        prefiller = gateway.workers[state.assigned]
        await prefiller.claim(stream)
        prefiller.send(stream, 2, 7)
        other.send(stream, 3, 8, finish="length")
        assert state.is_over
    assert not gateway.requests.counters["quarantined"]


async def test_a_name_with_two_holders_gets_no_work_until_one_is_gone(gateway: Gateway) -> None:
    await gateway.fleet()
    older, younger = await twins(gateway)
    assert gateway.requests.not_ready_reason.startswith("no decode worker agrees with this gateway (name)")
    await younger.stop()
    await older.beat()
    assert gateway.requests.ready
    again = await gateway.worker("d0", "decode", incarnation=3)
    await asyncio.sleep(BOTH_BEAT_S)
    assert not gateway.requests.ready
    await again.die()
    await asyncio.sleep(3.0 + BOTH_BEAT_S)
    assert gateway.requests.ready


async def test_a_restart_under_the_same_name_is_no_second_holder(gateway: Gateway) -> None:
    _, _, decoder = await gateway.fleet()
    await decoder.die()
    await gateway.worker("d0", "decode", incarnation=2)
    await asyncio.sleep(BOTH_BEAT_S)
    assert gateway.requests.ready
    assert gateway.peers.contested == []
