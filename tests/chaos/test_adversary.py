"""What no honest worker says: refused, counted and survived; nothing stays held and honest answers stay right."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import pytest_asyncio

from common import subjects
from tests.chaos.adversary import Liar, counted, liar
from tests.chaos.asks import Oracle, ask
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.poison import send

DECODE = "decode-0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with ChaosCluster(folder, model=model, prefill=1, decode=1, **FAKE) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacker(cluster: ChaosCluster) -> AsyncIterator[Liar]:
    async with liar(cluster, DECODE) as one:
        yield one


async def test_an_honest_hand_over_of_the_liar_would_be_accepted(attacker: Liar) -> None:
    job, lease = await attacker.reserve()
    assert (await attacker.hand_over(job, lease, await attacker.push(lease))).accepted


async def test_a_bit_flipped_on_the_way_is_caught_by_its_digest(cluster: ChaosCluster, attacker: Liar) -> None:
    for _ in range(20):
        job, lease = await attacker.reserve()
        digests = await attacker.push(lease)
        attacker.flip_a_bit()
        await attacker.push(lease)
        reply = await attacker.hand_over(job, lease, digests)
        assert (reply.accepted, reply.reason) == (False, "digest")
    assert await counted(cluster, "baton_worker_bad_digests", DECODE, 20) == 20


async def test_stale_and_late_hand_overs_are_refused(cluster: ChaosCluster, attacker: Liar) -> None:
    before = await counted(cluster, "baton_worker_refused_handoffs", DECODE, 0)
    job, lease = await attacker.reserve()
    digests = await attacker.push(lease)
    lies = [{"generation": lease.generation + 1}, {"decode_incarnation": 1}, {"attempt": 2}, {"lease_id": 999_999}]
    for lie in lies:
        reply = await attacker.hand_over(job, lease, digests, **lie)
        assert not reply.accepted, lie
    await attacker.give_back(job, lease)
    assert not (await attacker.hand_over(job, lease, digests)).accepted
    job, lease = await attacker.reserve(remaining_ms=200)
    digests = await attacker.push(lease)
    await asyncio.sleep(0.3)  # the lease runs out: this is the fault
    assert not (await attacker.hand_over(job, lease, digests)).accepted
    assert await counted(cluster, "baton_worker_refused_handoffs", DECODE, before + 6) == before + 6


async def test_rubbish_on_every_subject_is_counted_and_survived(cluster: ChaosCluster, oracle: Oracle) -> None:
    client = await nats.connect(cluster.nats.url)
    (gateway,) = {
        subject.removeprefix("baton.gatebeat.") for subject in [await _first_subject(client, "baton.gatebeat.*")]
    }
    aimed = [subjects.worker(DECODE), subjects.worker("prefill-0"), subjects.gateway(gateway), subjects.frames(gateway)]
    aimed += [subjects.peer(DECODE, "x"), subjects.order(DECODE, "x"), subjects.gateway(gateway, "x")]
    for subject in [*aimed, subjects.heartbeat("x"), subjects.gateway_heartbeat("x"), subjects.jobs("prefill-0")]:
        for rubbish in (b"", b"\xc1", b"\x91" * 5000, os.urandom(100), b"\x81\xa4type\xa6cancel"):
            await client.publish(subject, rubbish)
    await client.flush()
    await client.close()
    outcome = await send(cluster, ask(0, oracle, deadline_s=30))
    assert outcome.choices == oracle.answer(outcome.ask.body)
    for worker in (DECODE, "prefill-0"):
        assert await counted(cluster, "baton_worker_malformed_messages", worker, 5) >= 5
    assert all(process.returncode is None for process in cluster.processes.values())
    assert await cluster.until_idle() == []


async def _first_subject(client: nats.NATS, pattern: str) -> str:
    subscription = await client.subscribe(pattern)
    message = await subscription.next_msg(timeout=60)
    await subscription.unsubscribe()
    return message.subject
