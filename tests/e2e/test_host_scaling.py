"""A host that follows a planner's counts, in processes of their own: a worker comes with load, and drains after it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from common.messages import WorkerState
from common.words import WorkerStatus
from tests.e2e.asking import complete, expected, until
from tests.e2e.hosting import OWN, PATIENCE_S, SPARE, followed
from tests.e2e.stack import ROOT

MODEL = ROOT / "demo"
LONG = 700  # tokens of an answer that outlives the planner's patience: 14 s


async def ask(client: httpx.AsyncClient, seed: int, tokens: int) -> None:
    """An answer, which must be right."""
    prompt = [(seed * 31 + at * 7) % 200 + 3 for at in range(20)]
    answer = await complete(client, prompt, max_tokens=tokens)
    assert answer["tokens"] == expected(MODEL, prompt, tokens)


async def metrics(client: httpx.AsyncClient, name: str) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(name))
    return {labels: float(value) for labels, _, value in found}


async def total(client: httpx.AsyncClient, name: str) -> float:
    return sum((await metrics(client, name)).values())


@pytest.mark.long
async def test_a_worker_comes_with_load_and_drains_after_it_and_no_answer_is_lost(tmp_path: Path) -> None:
    async with (
        followed(tmp_path, MODEL) as running,
        httpx.AsyncClient(base_url=running.site.url, timeout=PATIENCE_S) as client,
    ):
        peers = running.peers
        left: list[WorkerState] = []
        peers.on_changed(lambda state: left.append(state) if state.status is WorkerStatus.DRAINING else None)
        has_come = asyncio.Event()

        async def keep_busy(number: int) -> None:
            for turn in range(10_000):
                if has_come.is_set():
                    return
                await ask(client, 100 * number + turn, 60)

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(keep_busy(number)) for number in range(12)]
            await until(peers, lambda states: {OWN, SPARE} == {one.worker for one in states if _is_ready(one)}, 90.0)
            said = await metrics(client, "baton_hosted_workers")
            assert said['baton_hosted_workers{count="wanted",model_name="tiny",role="decode"}'] >= 2
            assert said['baton_hosted_workers{count="running",model_name="tiny",role="decode"}'] == 2
            long = [group.create_task(ask(client, 7, LONG)) for _ in range(4)]
            has_come.set()
            await asyncio.wait(clients)
            while not peers.states[SPARE].running:
                long.append(group.create_task(ask(client, len(long), LONG)))
                await asyncio.sleep(0.5)
            await until(peers, lambda states: {one.worker for one in states} == {OWN}, 90.0)
        assert [state.worker for state in left] == [SPARE]
        assert left[0].running > 0  # what ran there ended there
        assert await total(client, "baton_request_attempts_sum") == await total(client, "baton_request_attempts_count")
        assert await total(client, "baton_request_errors_total") == 0
        log = (tmp_path / "h.log").read_text()
        assert log.count("host.worker_starts") == log.count("host.worker_stops") == 1
        assert "planner.refused" not in (tmp_path / "p.log").read_text()
        await ask(client, 9, 8)


def _is_ready(state: WorkerState) -> bool:
    return state.status is WorkerStatus.READY
