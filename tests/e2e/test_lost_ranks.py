"""A rank that dies takes its worker with it, and nothing else: requests are done elsewhere, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from common import subjects
from common.messages import WorkerState, frame_decoder
from tests.e2e.asking import all_idle, complete, until, watching
from tests.e2e.wide import WideCluster, ended, pools_of, ranks_of
from tests.models import build_tiny_model
from tests.reference import greedy_tokens
from worker.worker import EXIT_DEVICE_BROKEN

BOUND_S = 60.0
PROMPTS = [[(31 * index + 7 * at) % 400 + 10 for at in range(20 + 33 * index)] for index in range(4)]
NEW_TOKENS = 60
IDLE, COMPUTING, RECEIVING = "idle", "computing", "receiving"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "role", "point"),
    [
        pytest.param(*each, marks=[] if each == ("widths", "decode", COMPUTING) else [pytest.mark.long])
        for kind in ("widths", "depths")
        for each in (
            (kind, "decode", COMPUTING),
            (kind, "decode", IDLE),
            (kind, "decode", RECEIVING),
            (kind, "prefill", IDLE),
            (kind, "prefill", COMPUTING),
        )
    ],
)
async def test_a_worker_ends_with_its_rank_and_its_requests_are_done_elsewhere(
    kind: str, role: str, point: str, tmp_path: Path
) -> None:
    """A rank, or stage, that stands still first dies within a pass, or while handoffs to it are on their way."""
    model = build_tiny_model(tmp_path / "llama", "llama")
    expected = greedy_tokens(model, PROMPTS, NEW_TOKENS)
    counts, name = {"prefill": 1, "decode": 1, role: 2}, f"{role}-0"

    def has_work(states: list[WorkerState]) -> bool:
        its = next(state for state in states if state.worker == name)
        return bool(its.held_blocks if point == RECEIVING else its.running + its.waiting)

    async with (
        WideCluster(tmp_path / "run", model=model, **{kind: {name: 2}}, **counts) as cluster,  # type: ignore[arg-type]
        watching(cluster) as (bus, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        leader, decoding = cluster.processes[name], asyncio.Event()
        (rank,) = ranks_of(leader.pid)
        await until(peers, lambda states: len(states) == 3)
        await bus.subscribe(subjects.frames("gateway", name), frame_decoder, lambda _: decoding.set())
        pools = pools_of(leader.pid) | pools_of(rank)
        assert len(pools) == 2
        stands_still = point == RECEIVING or (role, point) == ("prefill", COMPUTING)
        if stands_still:
            os.kill(rank, signal.SIGSTOP)
        asking = []
        if point != IDLE:
            asking = [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
            async with asyncio.timeout(BOUND_S):
                await (until(peers, has_work) if stands_still else decoding.wait())
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(BOUND_S):
            code = await leader.wait()
        asking = asking or [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
        answers = [await each for each in asking]
        await until(peers, lambda states: len(states) == 2 and all_idle(states))
        said = (cluster.folder / f"{name}.log").read_text()
        assert not any(pool.exists() for pool in pools)
    assert code == EXIT_DEVICE_BROKEN
    assert f"rank 1 (pid {rank}) ended with signal SIGKILL" in said
    assert [answer["tokens"] for answer in answers] == expected


@pytest.mark.long
@pytest.mark.parametrize("point", [IDLE, COMPUTING])
async def test_a_rank_that_is_stopped_is_named_and_ended_with_its_worker(point: str, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    name = "decode-0"
    async with (
        WideCluster(tmp_path / "run", model=model, widths={name: 2}, decode=2) as cluster,
        watching(cluster) as (bus, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        leader, decoding = cluster.processes[name], asyncio.Event()
        (rank,) = ranks_of(leader.pid)
        handle = os.pidfd_open(rank)
        await bus.subscribe(subjects.frames("gateway", name), frame_decoder, lambda _: decoding.set())
        asking = []
        if point == COMPUTING:
            asking = [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
            async with asyncio.timeout(BOUND_S):
                await decoding.wait()
        os.kill(rank, signal.SIGSTOP)
        async with asyncio.timeout(BOUND_S):
            code = await leader.wait()
            await ended(handle)
        asking = asking or [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
        answers = [await each for each in asking]
        await until(peers, lambda states: len(states) == 2 and all_idle(states))
        said = (cluster.folder / f"{name}.log").read_text()
    assert code == EXIT_DEVICE_BROKEN
    assert f"rank 1 (pid {rank}) stands still: no sign of life for" in said
    assert [answer["tokens"] for answer in answers] == greedy_tokens(model, PROMPTS, NEW_TOKENS)


@pytest.mark.long
async def test_a_rank_that_dies_while_it_loads_ends_its_worker(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    name = "decode-1"
    async with WideCluster(tmp_path / "run", model=model, widths={name: 2}, decode=2) as cluster:
        cluster.kill(name)
        await cluster.processes[name].wait()
        await cluster.start(name)
        leader = cluster.processes[name]
        async with asyncio.timeout(BOUND_S):
            while not ranks_of(leader.pid):
                await asyncio.sleep(0)
            (rank,) = ranks_of(leader.pid)
            os.kill(rank, signal.SIGKILL)
            code = await leader.wait()
        said = (cluster.folder / f"{name}.log").read_text()
    assert code == EXIT_DEVICE_BROKEN
    assert f"rank 1 (pid {rank}) ended with signal SIGKILL" in said


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size"), [("widths", 2), ("widths", 4), ("depths", 2)])
async def test_ranks_end_with_their_leader_and_leave_no_memory(kind: str, size: int, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    name = "decode-1"
    async with (
        WideCluster(tmp_path / "run", model=model, **{kind: {name: size}}, decode=2) as cluster,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        leader = cluster.processes[name]
        ranks = ranks_of(leader.pid)
        pools = set().union(*map(pools_of, (leader.pid, *ranks)))
        assert (len(ranks), len(pools)) == (size - 1, size)
        handles = [os.pidfd_open(rank) for rank in ranks]
        asking = [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
        cluster.kill(name)
        async with asyncio.timeout(BOUND_S):
            for handle in handles:
                await ended(handle)
        assert not any(pool.exists() for pool in pools)
        answers = [await each for each in asking]
    assert [answer["tokens"] for answer in answers] == greedy_tokens(model, PROMPTS, NEW_TOKENS)
