"""Workers of vectors come with load and go after it, beside those of a model that generates: a host's file, and `baton up`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from services.runtime.permissions import Member
from tests.e2e.asking import complete, expected
from tests.e2e.hosting import PATIENCE_S, QUICK, Site, site
from tests.e2e.pulling import pull, put, serving
from tests.e2e.stack import ROOT
from tests.hub import hub_served
from tests.pooling_models import build_pooling_model

TINY = ROOT / "demo"
TEXTS = [f"the cat sat on the mat {at}" for at in range(48)]
FAKE = {"device": "fake:20:50", "kv_memory_mb": 8, "max_sequences": 4}
CLIENTS = 8
STARTS_S = 150.0  # of a worker, where the planner waits for long
Busy = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose passes outlast what surrounds them."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    return build_pooling_model(tmp_path_factory.mktemp("model") / "mini", **wide)


class Load:
    """Requests of clients to a gateway with both models; every answer must be right."""

    def __init__(self, client: httpx.AsyncClient, vectors: str = "mini") -> None:
        self._client, self._embeds = client, vectors
        self._numbers = itertools.count()
        self._vectors: list[list[float]] = []

    async def embed(self) -> None:
        """The same texts at each time: whoever computes them, and beside whatever, the numbers are the same."""
        answer = await self._client.post("/v1/embeddings", json={"model": self._embeds, "input": TEXTS})
        assert answer.status_code == 200, answer.text
        found = [one["embedding"] for one in answer.json()["data"]]
        self._vectors = self._vectors or found
        assert len(found) == len(TEXTS)
        assert (
            max(
                abs(a - b)
                for one, other in zip(found, self._vectors, strict=True)
                for a, b in zip(one, other, strict=True)
            )
            < 1e-5
        )

    async def complete(self) -> None:
        prompt = [(next(self._numbers) * 31 + at * 7) % 200 + 3 for at in range(20)]
        answer = await complete(self._client, prompt, max_tokens=60)
        assert answer["tokens"] == expected(TINY, prompt, 60)

    async def running(self, model: str) -> int:
        """Workers of a model that its host runs."""
        lines = (await self._client.get("/metrics")).text.splitlines()
        labels = f'baton_hosted_workers{{count="running",model_name="{model}",'
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(labels))

    async def errors(self) -> float:
        lines = (await self._client.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("baton_request_errors_total"))

    async def until(self, **wanted: int) -> None:
        """Wait until hosts run so many workers of each model."""
        async with asyncio.timeout(STARTS_S):
            while {model: await self.running(model) for model in wanted} != wanted:
                await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def by(self, ask: Busy) -> AsyncIterator[None]:
        """Clients that ask one after another until the block ends; what they ask last is answered, too."""
        enough = asyncio.Event()

        async def keep_busy() -> None:
            while not enough.is_set():
                await ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(keep_busy())
            yield
            enough.set()


def entry(running: Site, model: str, folder: Path, service: str, **options: object) -> str:
    """The part of a host's file with a worker, and a spare one."""
    reach = running.reach("pool" if service == "pool" else "decode")
    lines = "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in ({"model": str(folder)} | options | reach).items()
    )
    return f'[[worker]]\nmodel = "{model}"\nservice = "{service}"\nmost = 2\n[worker.options]\n{lines}'


@contextlib.asynccontextmanager
async def hosted(folder: Path, vectors: Path) -> AsyncIterator[Load]:
    """A host of both models that follows a planner as patient as a test."""
    members = [Member("gateway", "g"), Member("planner", "p"), Member("host", "h"), Member("decode"), Member("pool")]
    async with site(folder, members) as running:
        entries = entry(running, "tiny", TINY, "decode", **FAKE) + entry(running, "mini", vectors, "pool", device="cpu")
        (folder / "host.toml").write_text(f'name = "h"\ndrain_s = 60\n{entries}')
        await running.start("h", "services.host", str(folder / "host.toml"), *running.flags("h", "nats"))
        words = ["tests.e2e.tuned", "gateway", "--slo-window-s", "3", "--gateway-id", "g", "--port", running.port]
        words += ["--model", f"tiny={TINY}", "--model", f"mini={vectors}", "--keep-alive", "-1"]
        await running.start("g", *words, *running.flags("g", "nats", "redis"))
        words = ["tests.e2e.tuned", "planner", *QUICK, "--plan-pause-s", "6", "--planner-id", "p"]
        await running.start("p", *words, *running.flags("p", "nats"))
        await running.until_ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            yield Load(client)


@pytest.mark.long
async def test_each_model_of_a_host_gets_workers_by_its_own_load_and_gives_them_back(
    vectors: Path, tmp_path: Path
) -> None:
    async with hosted(tmp_path, vectors) as load:
        await load.embed()
        await load.complete()
        assert (await load.running("mini"), await load.running("tiny")) == (1, 1)
        async with load.by(load.embed):
            await load.until(mini=2, tiny=1)
            await load.complete()
        async with load.by(load.complete):  # meanwhile the other model's second worker drains
            await load.until(mini=1, tiny=2)
            await load.embed()
        await load.until(mini=1, tiny=1)
        await load.embed()
        await load.complete()
        assert await load.errors() == 0
        log = (tmp_path / "h.log").read_text()
        assert log.count("host.worker_starts") == log.count("host.worker_stops") == 2
        assert "planner.refused" not in (tmp_path / "p.log").read_text()


@pytest.mark.long
async def test_up_starts_more_workers_of_a_pulled_model_of_vectors(vectors: Path, tmp_path: Path) -> None:
    """With a planner as it is. The place goes to the next model with all of them."""
    more = ("--decode", "1-2", "--planner", "--keep-alive", "5m", "--max-loaded", "1", "--threads", "1")
    with hub_served() as hub:
        put(hub, "org/vectors", vectors)
        async with serving(hub, tmp_path, "--kv-memory-mb", "8", *more) as (stack, client):
            await pull(client, "org/vectors")
            load = Load(client, "org/vectors")
            async with load.by(load.embed):
                await load.until(**{"org/vectors": 2})
                assert len(stack.children("services.pool")) == 2
            await complete(client, [7, 11, 13], model="demo", max_tokens=4)
            assert (await load.running("org/vectors"), await load.running("demo")) == (0, 1)
            await load.embed()
            assert await load.errors() == 0
