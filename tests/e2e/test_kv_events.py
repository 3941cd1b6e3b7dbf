"""A router's reader in a process of its own follows a worker's blocks over real ZeroMQ, though it loses batches on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.asking import client_of
from tests.e2e.cluster import Cluster
from tests.e2e.evicting import LENGTH, OPTIONS, PROMPTS, asked, asked_until_answered
from tests.models import build_tiny_model
from tests.needs import needs
from tests.ports import own_port

needs("zmq")

BLOCK = 16
READER = Path(__file__).with_name("kv_event_reader.py")
TOPIC = "kv@10.0.0.7:8000@tiny"
Tiers = dict[str, list[list[int]]]


class Reader:
    """The newest of the lines that the reader prints."""

    def __init__(self) -> None:
        self.batch, self.tiers = -1, Tiers()
        self._came = asyncio.Condition()

    async def follow(self, lines: asyncio.StreamReader) -> None:
        while (line := await lines.readline()).endswith(b"\n"):  # the last one may be cut
            said = json.loads(line)
            assert (said["batch"], said["rank"]) == (self.batch + 1, 2)
            async with self._came:
                self.batch, self.tiers = said["batch"], said["tiers"]
                self._came.notify_all()

    async def until(self, holds: Callable[[Tiers], bool]) -> None:
        async with asyncio.timeout(60), self._came:
            await self._came.wait_for(lambda: self.batch >= 0 and holds(self.tiers))

    def num_cached(self, prompt: list[int]) -> int:
        """Tokens of the prompt that a router expects to be found, but its last one."""
        known = {tuple(tokens) for tier in self.tiers.values() for tokens in tier}
        ends = range(BLOCK, LENGTH, BLOCK)
        return BLOCK * next((at for at, end in enumerate(ends) if tuple(prompt[:end]) not in known), len(ends))


@contextlib.asynccontextmanager
async def reading(pub: int, replay: int) -> AsyncIterator[Reader]:
    addresses = (f"tcp://127.0.0.1:{pub}", f"tcp://127.0.0.1:{replay}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(READER), *addresses, TOPIC, stdout=asyncio.subprocess.PIPE, limit=1 << 26
    )
    assert process.stdout is not None
    reader = Reader()
    following = asyncio.create_task(reader.follow(process.stdout))
    try:
        yield reader
    finally:
        process.kill()
        await process.wait()
        await following


def config_at(port: int) -> dict[str, Any]:
    """The worker's setting, whose rank is added to its two ports."""
    config: dict[str, Any] = {"enable_kv_cache_events": True, "topic": TOPIC, "bind": True, "data_parallel_rank": 2}
    config |= {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{port + 4}"}
    return {"kv_events_config": json.dumps(config)}


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("comes", ["first", "late"])
async def test_a_reader_that_loses_batches_knows_what_every_tier_has(comes: str, tmp_path: Path) -> None:
    port = own_port(run=8)
    options = OPTIONS | config_at(port)
    model = build_tiny_model(tmp_path / "llama", "llama")
    async with (
        contextlib.AsyncExitStack() as held,
        Cluster(tmp_path / "run", model=model, prefill=0, decode=0, both=1, **options) as cluster,
        client_of(cluster) as client,
    ):
        if comes == "first":
            reader = await held.enter_async_context(reading(port + 2, port + 6))
        for prompt in PROMPTS:
            await asked(client, prompt)
        if comes == "late":
            reader = await held.enter_async_context(reading(port + 2, port + 6))
        async with asyncio.timeout(120):
            matches = 0
            while matches < len(PROMPTS):  # in a row: what is on its way to the reader or to the host ends that
                for prompt in PROMPTS:
                    expected = reader.num_cached(prompt)
                    matches = matches + 1 if (await asked(client, prompt))[1] == expected else 0
        assert {tier for tier, blocks in reader.tiers.items() if blocks} == {"GPU", "CPU"}
        cluster.processes["worker-0"].terminate()
        await reader.until(lambda tiers: not any(tiers.values()))


@pytest.mark.long
async def test_files_are_told_also_those_of_the_process_before(tmp_path: Path) -> None:
    port = own_port(run=8)
    options = OPTIONS | config_at(port) | {"kv_host_mb": 1, "kv_disk": f"{tmp_path}/kv:64"}
    prompts = [*PROMPTS, *([token + 1 for token in prompt] for prompt in PROMPTS)]
    model = build_tiny_model(tmp_path / "llama", "llama")
    async with (
        Cluster(tmp_path / "run", model=model, prefill=0, decode=0, both=1, **options) as cluster,
        client_of(cluster) as client,
    ):
        for _ in range(3):
            for prompt in prompts:
                await asked(client, prompt)
        async with reading(port + 2, port + 6) as reader:
            await reader.until(lambda tiers: bool(tiers.get("STORAGE")))
        cluster.kill("worker-0")
        await cluster.processes["worker-0"].wait()
        await cluster.start("worker-0")
        await cluster.until_ready()
        async with reading(port + 2, port + 6) as reader:
            for prompt in prompts:
                await asked_until_answered(client, prompt)
            await reader.until(lambda tiers: bool(tiers.get("STORAGE")))
