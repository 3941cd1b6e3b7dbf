"""Requests to a model that pools, over NATS: what a client that leaves costs, and the spans of each process."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from common.bus import NatsSettings, connect_bus
from common.peers import Peers
from engine.pooling.engine import PoolingInput
from gateway.answers.catalogue import Catalogue
from gateway.app import HttpSettings, create_app
from gateway.observe.spans import RequestSpans
from gateway.placement.agreement import Own
from gateway.pooling.fleet import PIECE_TOKENS
from gateway.pooling.service import PoolingModels
from gateway.pooling.texts import TextTokenizer
from gateway.tenants.budgets import LocalBudgets
from gateway.tenants.tenants import Tenant, Tenants
from modelfiles.pooling import Pooling
from tests.fakes.generations import ScriptedGenerations, ScriptedWorkers
from tests.integration.waiting import LIMIT_S, eventually
from tests.pooling_models import build_pooling_model
from tests.unit.gateway.recorder import Recorder
from worker.identity import Identity
from worker.pooling.pooler import Pooler, PoolerSettings
from worker.settings import ModelIdentity

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MINUTE = 1_000_000  # tokens of the tenant's budget
LEFT = 'baton_request_errors_total{code="client_left",model_name="mini"}'
KEY = "k" * 20
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
TENANTS = f"""
[tenants.t]
keys = ["{KEY}"]
tokens_per_minute = {MINUTE}
"""


class Device:
    """Computes vectors of one number, once it may; one pass is announced by `begun`."""

    fingerprint, vocab_size, max_model_len, pooling = "f", 128, PIECE_TOKENS, Pooling(size=1, max_len=PIECE_TOKENS)
    found: Sequence[int] = ()

    def __init__(self) -> None:
        self.may, self.begun = threading.Event(), threading.Event()
        self.computed = list[int]()  # first tokens
        self.salts = set[str]()

    def compute(self, inputs: Sequence[PoolingInput]) -> list[torch.Tensor]:
        self.computed += [one.tokens[0] for one in inputs]
        self.salts |= {one.salt for one in inputs}
        self.begun.set()
        self.may.wait(LIMIT_S)
        return [torch.ones(1, 1) for _ in inputs]


@dataclass
class World:
    app: FastAPI
    device: Device
    spans: dict[str, Recorder]  # by process
    worker: Pooler

    async def post(self, left: asyncio.Event, path: str = "/v1/embeddings", **body: object) -> tuple[int, Any]:
        """The answer's status and headers, for a client that disconnects once `left` is set."""
        raw, told, sent = json.dumps({"model": "mini", **body}).encode(), [False], list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            if not told[0]:
                told[0] = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = {"content-type": "application/json", "traceparent": CLIENT, **AUTHORIZED}
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("localhost", 80),
        }
        await self.app(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pooling_model(tmp_path_factory.mktemp("model") / "mini")


@asynccontextmanager
async def running(nats_url: str, folder: Path, most: int) -> AsyncIterator[World]:
    """A gateway's application and a worker on connections of their own; passes have `most` tokens."""
    device, stopping = Device(), asyncio.Event()
    tokenizer = TextTokenizer.read(folder)
    spans = {"gateway": Recorder(), "worker": Recorder()}
    settings = PoolerSettings(
        served=ModelIdentity("mini", tokenizer_fingerprint=tokenizer.fingerprint),
        max_batch_tokens=most,
        step_timeout_s=10 * LIMIT_S,
        drain_s=LIMIT_S,
    )
    nats = NatsSettings(url=nats_url)
    async with connect_bus(nats, name="g") as bus, connect_bus(nats, name="w", owns_streams=False) as of_worker:
        peers = Peers()
        await peers.start(bus)
        worker = Pooler(
            bus=of_worker,
            identity=Identity("w", 1),
            engine=device,
            settings=settings,
            end_process=sys.exit,
            tracer=spans["worker"],
        )
        task = asyncio.create_task(worker.run(stopping))
        known = {"mini": Own(tokenizer=tokenizer.fingerprint)}
        pooling = PoolingModels(bus, peers, {"mini": tokenizer}, known, gateway_id="g", tracer=spans["gateway"])
        script = ScriptedGenerations(lambda spec: [])
        script.timelines.on_end(RequestSpans(spans["gateway"], "g").record)
        tenants = folder.parent / "tenants.toml"
        tenants.write_text(TENANTS)
        catalogue = Catalogue({}, ScriptedWorkers(script), pooled={"mini": tokenizer.facts})
        app = create_app(
            generations=script,
            catalogue=catalogue,
            settings=HttpSettings(tenants=Tenants(path=tenants)),
            budgets=LocalBudgets(clock=lambda: 0.0),
            pooling=pooling,
            tracer=spans["gateway"],
        )

        async def is_ready() -> bool:
            return pooling.num_ready > 0

        await eventually(is_ready)
        try:
            yield World(app, device, spans, worker)
        finally:
            device.may.set()
            stopping.set()
            with suppress(asyncio.CancelledError):
                await task
            await peers.close()


async def test_a_client_that_leaves_costs_the_pass_that_runs_and_no_more(nats_url: str, folder: Path) -> None:
    async with running(nats_url, folder, most=4) as world, reader(world) as client:
        left = asyncio.Event()
        asked = asyncio.create_task(world.post(left, input=[[at, 1, 1, 1] for at in range(2, 34)]))
        assert await asyncio.to_thread(world.device.begun.wait, LIMIT_S)
        left.set()
        assert (await asked)[0] == 499
        [line] = (await client.get("/debug/requests")).json()["latest"]
        assert (line["status"], line["detail"]) == ("cancelled", "client disconnected")
        assert LEFT + " 1.0" in (await client.get("/metrics")).text.splitlines()

        staying = asyncio.create_task(client.post("/v1/embeddings", json={"model": "mini", "input": [[99, 1]]}))

        async def is_heard() -> bool:  # and with it what was sent before
            return world.worker.state().waiting == 32

        await eventually(is_heard)
        world.device.may.set()
        answer = await staying
        assert answer.json()["usage"]["total_tokens"] == 2
        assert world.device.computed == [2, 99], "nothing of who left but the pass that ran already"
        assert world.worker.state().totals.dropped_inputs == 31
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == MINUTE - 2, "the whole charge came back"


async def test_one_trace_goes_from_the_request_to_the_pass(nats_url: str, folder: Path) -> None:
    async with running(nats_url, folder, most=4) as world:
        world.device.may.set()
        world.device.found = [2, 0]
        status, _ = await world.post(asyncio.Event(), "/v1/embeddings", input=[[5, 6, 7], [8]])
        assert status == 200
        gateway, worker = (
            {span.name: span for span in recorder.spans if span.context[3:35] == CLIENT[3:35]}
            for recorder in world.spans.values()
        )
        assert (set(gateway), set(worker)) == (
            {"POST /v1/embeddings", "admission", "attempt", "placement", "queue"},
            {"wait", "pool"},
        )
        server, attempt = gateway["POST /v1/embeddings"], gateway["attempt"]
        assert {gateway[name].parent for name in ("admission", "attempt")} == {server.context}
        assert {span.parent for span in (gateway["placement"], gateway["queue"], *worker.values())} == {attempt.context}
        assert (attempt.attributes["baton.outcome"], attempt.attributes["baton.prefill.worker"]) == ("ok", "w")
        told = [worker["pool"].attributes[f"baton.{name}"] for name in ("inputs", "cached_tokens", "computed_tokens")]
        assert told == [2, 2, 2]
        assert server.attributes["gen_ai.operation.name"] == "embeddings"
        assert server.attributes["gen_ai.usage.input_tokens"] == 4
        assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
        assert world.worker.state().totals.cached_tokens == 2
        assert world.device.salts == {Tenant(name="t", cache_salt="t").salt("")}, "the tenant's own"
        async with reader(world) as client:
            [line] = (await client.get("/debug/requests")).json()["latest"]
            assert (line["prompt_tokens"], line["cached_tokens"]) == (4, 2)
        assert server.attributes["baton.pool.workers"] == ["w"]
        assert not any(span.error for span in (*gateway.values(), *worker.values()))


def reader(world: World) -> httpx.AsyncClient:
    """A client that stays."""
    transport = httpx.ASGITransport(world.app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=AUTHORIZED)
