"""Poison and broken devices: scenarios on the fake device, whose faults strike a prompt that begins with a certain token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import nats

from common import subjects
from common.messages import job_decoder
from tests.chaos.asks import KINDS, Ask, Oracle, ask
from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Outcome, request

KILLS, KILLS_DECODING = 505, 506  # first tokens of prompts that nobody else uses
FAULTS = f"exit:{KILLS},exit-decoding:{KILLS_DECODING}"


def poisoned(number: int, oracle: Oracle, token: int, *, deadline_s: float = 60.0) -> Ask:
    """A short streamed request that begins with `token`: too short to be cached, so that its computation begins there again."""
    sound = ask(
        12 * len(KINDS) * number, oracle, deadline_s=deadline_s
    )  # of the first kind: one choice, streamed to its end
    return replace(sound, kind=f"poison {token}", body=sound.body | {"prompt": [token, 10 + number, 11]})


async def send(cluster: ChaosCluster, asked: Ask) -> Outcome:
    """Ask once."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=None, verify=False) as client:
        return await request(client, asked)


async def dead_jobs(cluster: ChaosCluster) -> list[list[int]]:
    """Prompts of the jobs among the dead letters."""
    client = await nats.connect(cluster.nats.url)
    try:
        stream = client.jetstream()
        info = await stream.stream_info(subjects.DEAD_STREAM, subjects_filter=">")
        found = []
        for number in range(info.state.first_seq, info.state.last_seq + 1):
            message = await stream.get_msg(subjects.DEAD_STREAM, number)
            if message.subject == subjects.dead_letter("job"):
                job = job_decoder.decode(message.data or b"")
                found.append([int.from_bytes(job.token_ids[i : i + 4], "little") for i in range(0, 12, 4)])
        return found
    finally:
        await client.close()


class Supervisor:
    """Starts workers again that ended, as an orchestrator would; `deaths` has their exit codes."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self.deaths: list[tuple[str, int]] = []
        self._cluster = cluster
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Supervisor:
        self._tasks = [asyncio.create_task(self._watch(name)) for name in self._cluster.names]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, name: str) -> None:
        while True:
            code = await self._cluster.processes[name].wait()
            self.deaths.append((name, code))
            await self._cluster.start(name)
