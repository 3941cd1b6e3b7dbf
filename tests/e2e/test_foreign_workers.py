"""A worker in the wrong place on the bus, beside the right one and after it is gone: real processes, fake device."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from tests.e2e.asking import until, watching
from tests.e2e.cluster import Cluster
from tests.models import build_tiny_model

OURS, FOREIGN = "decode-0", "decode-1"


class Guarded(Cluster):
    """A cluster of one prefill and one decode worker; FOREIGN comes when it is started."""

    def __init__(self, folder: Path, *, model: Path, foreign: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(folder, model=model, decode=2, fake=True, **options)
        self.names.remove(FOREIGN)
        self._expected["decode"] = 1
        self._foreign = foreign

    def _worker_flags(self, name: str) -> list[str]:
        return super()._worker_flags(name) + list(self._foreign if name == FOREIGN else ())

    async def restart_gateway(self, *options: str) -> None:
        self._gateway_options = options
        self.kill("gateway")
        await self.processes["gateway"].wait()
        await self.start("gateway")

    async def said(self) -> dict[str, Any]:
        """The answer of /ready; nothing while nobody answers."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            with contextlib.suppress(httpx.TransportError):
                told: dict[str, Any] = (await client.get("/ready")).json()
                return told
        return {}

    async def until_refused(self, *workers: str, ready: bool) -> dict[str, str]:
        """Why these alone get no work, once the gateway is ready, or is not."""
        async with asyncio.timeout(60):
            while True:
                told = await self.said()
                refused: dict[str, str] = told.get("refused", {})
                if told and (told["status"] == "ready") == ready and set(workers) == refused.keys():
                    return refused
                await asyncio.sleep(0.05)

    async def asked(self) -> httpx.Response:
        body = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 8, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            return await client.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one family, with one tokenizer: other weights are all that tells them apart."""
    folder = tmp_path_factory.mktemp("models")
    ours = build_tiny_model(folder / "ours", "llama")
    others = build_tiny_model(folder / "others", "llama", seed=1)
    shutil.copy(ours / "tokenizer.json", others / "tokenizer.json")
    return {"ours": ours, "others": others}


@contextlib.asynccontextmanager
async def idle_after(cluster: Cluster) -> AsyncIterator[None]:
    """The foreign worker computes nothing meanwhile."""
    async with watching(cluster) as (_, peers):
        yield
        await until(peers, lambda states: FOREIGN in {state.worker for state in states})
        totals = peers.states[FOREIGN].totals
        assert (totals.generated_tokens, totals.prompt_tokens) == (0, 0)


async def test_the_dtype_that_served_before_wins_also_after_restarts_of_worker_and_gateway(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    async with Guarded(tmp_path, model=folders["ours"], foreign=("--dtype", "bfloat16")) as cluster:
        await cluster.start(FOREIGN)
        async with idle_after(cluster):
            refused = await cluster.until_refused(FOREIGN, ready=True)
            assert "not those of most or the first workers" in refused[FOREIGN]
            assert [(await cluster.asked()).status_code for _ in range(6)] == [200] * 6
            cluster.kill(OURS)
            await cluster.processes[OURS].wait()
            await cluster.start(OURS)
            await cluster.until_refused(FOREIGN, ready=True)  # it may have been the only one for a moment
            async with redis.asyncio.Redis.from_url(cluster.redis.url) as raw, asyncio.timeout(60):
                while not [key async for key in raw.scan_iter("baton:incumbents:*")]:
                    await asyncio.sleep(0.05)
            await cluster.restart_gateway()
            await cluster.until_refused(FOREIGN, ready=True)  # now it is the older one
            assert [(await cluster.asked()).status_code for _ in range(6)] == [200] * 6


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("name", ["tiny", "intruder"])
async def test_other_weights_answer_under_no_name(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    others = {FOREIGN: (name, folders["others"])}
    async with Guarded(tmp_path, model=folders["ours"], others=others) as cluster:
        await cluster.start(FOREIGN)
        async with idle_after(cluster):
            if name == "tiny":
                await cluster.until_refused(FOREIGN, ready=True)
            assert (await cluster.asked()).status_code == 200
            for worker in (OURS, "prefill-0"):
                cluster.kill(worker)
            refused = await cluster.until_refused(FOREIGN, ready=False)
            assert ("files of 'tiny'" if name == "tiny" else "it serves 'intruder'") in refused[FOREIGN]
            answer = await cluster.asked()
            assert answer.status_code == 503
            assert "no decode worker" in answer.json()["error"]["message"]
            async with asyncio.timeout(60):
                while "worker.refused" not in (cluster.folder / "gateway.log").read_text():
                    await asyncio.sleep(0.05)
            await cluster.restart_gateway(*(["--worker-models", name] if name != "tiny" else []))
            refused = await cluster.until_refused(FOREIGN, ready=False)
            assert "files of 'tiny'" in refused[FOREIGN]


async def test_workers_may_call_the_same_weights_otherwise_if_the_gateway_is_told(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    async with Guarded(tmp_path, model=folders["ours"], others={FOREIGN: ("theirs", folders["ours"])}) as cluster:
        await cluster.start(FOREIGN)
        for worker in (OURS, "prefill-0"):
            cluster.kill(worker)
        refused = await cluster.until_refused(FOREIGN, ready=False)
        assert "--worker-models theirs" in refused[FOREIGN]
        await cluster.restart_gateway("--worker-models", "theirs")
        await cluster.until_refused(ready=True)
        answer = await cluster.asked()
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
