"""The chart's pods as processes: probes answer, and what a rolling update or a drained node does to pods loses no token."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.runtime.permissions import Member, make_users
from services.runtime.servers import run_nats, run_redis
from tests.certificates import make_certificates
from tests.e2e.asking import expected
from tests.e2e.pods import Pod, from_files
from tests.models import build_tiny_model
from tests.secure_servers import redis_speaks_tls, run_secure_nats, run_secure_redis
from tests.unit.deploy.chart import manifests, values

KEY = "key-of-the-chart"
TOKENS = 200
HERE = {"BATON_DEVICE": "fake:15", "BATON_KV_MEMORY_MB": "8"}


@dataclass
class Release:
    """What `helm install` would have started."""

    pods: dict[str, Pod] = field(default_factory=dict)
    model: Path = Path()

    @property
    def client(self) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.pods['gateway'].ports['http']}"
        return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


@pytest.fixture
async def release(tmp_path: Path) -> AsyncIterator[Release]:
    """Gateway, planner, a prefill and two decode workers, over TLS where this Redis has it."""
    claim = tmp_path / "claim"
    model = build_tiny_model(claim / "model", "llama")
    users = make_users([Member(role) for role in ("gateway", "prefill", "decode", "planner")], tmp_path / "users")
    secrets = {"baton-api-keys": {"api-keys": KEY}, "baton-users": from_files(tmp_path / "users")}
    async with contextlib.AsyncExitStack() as held:
        changed: dict[str, Any] = {}
        if redis_speaks_tls():
            certificates = make_certificates(tmp_path / "certificates")
            files = {"ca.crt": certificates.ca, "tls.crt": certificates.client, "tls.key": certificates.client_key}
            secrets["tls"] = {name: file.read_text() for name, file in files.items()}
            changed["tlsSecret"] = "tls"
            nats = run_secure_nats(data_dir=tmp_path / "nats", users=users.nats, certificates=certificates)
            redis = run_secure_redis(data_dir=tmp_path / "redis", users=users.redis, certificates=certificates)
        else:
            nats = run_nats(data_dir=tmp_path / "nats", extra=users.nats)
            redis = run_redis(data_dir=tmp_path / "redis", users=users.redis)
        changed["natsUrl"] = (await held.enter_async_context(nats)).address
        changed["redisUrl"] = (await held.enter_async_context(redis)).address
        made = manifests(values(**changed))
        (shared,) = (one["data"] for one in made if one["kind"] == "ConfigMap")
        deployments = {one["metadata"]["name"]: one for one in made if one["kind"] == "Deployment"}
        found = Release(model=model)
        for name in ("gateway", "planner", "prefill", "decode", "decode-too"):
            pod = Pod(name, deployments[f"baton-{name.partition('-')[0]}"], tmp_path / "pods")
            await pod.start(shared, secrets, {"baton-models": claim}, **_on_this_machine(pod))
            held.push_async_callback(pod.close)
            found.pods[name] = pod
        yield found


def _on_this_machine(pod: Pod) -> dict[str, str]:
    if pod.name == "gateway":
        return {"BATON_HOST": "127.0.0.1", "BATON_PORT": str(pod.ports["http"]), "BATON_LOCAL_PREFILL_TOKENS": "0"}
    if pod.name == "planner":
        return {"BATON_PLAN_METRICS": f"127.0.0.1:{pod.ports['metrics']}"}
    return HERE


def worker_id(pod: Pod) -> str:
    """The name that a worker made up, from its log."""
    events = [json.loads(line) for line in pod.log.splitlines() if line.startswith("{")]
    (name,) = (event["worker"] for event in events if event["event"] == "worker.ready")
    return str(name)


async def one_that_decodes(client: httpx.AsyncClient, one: Pod, other: Pod) -> tuple[Pod, Pod]:
    """The one of two pods that has answers to lose, and the other one."""
    while True:
        running = (await client.get("/debug/requests")).json()["running"]
        assert running, "all answers are complete"
        busy = {request["decode_worker"] for request in running}
        for pod, rest in ((one, other), (other, one)):
            if worker_id(pod) in busy:
                return pod, rest
        await asyncio.sleep(0.02)


async def ask(client: httpx.AsyncClient, number: int, begun: asyncio.Event) -> list[int]:
    """Stream one answer; `begun` with its first token."""
    body = {"model": "model", "prompt": [number + 1] * 40, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    async with client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
    ) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                begun.set()
    return tokens


@pytest.mark.long
async def test_probes_answer_and_pods_that_are_deleted_under_load_lose_nothing(release: Release) -> None:
    pods, client = release.pods, release.client
    async with client, asyncio.timeout(150):
        await pods["gateway"].passes("startupProbe")
        for pod in pods.values():
            await pod.passes("readinessProbe")
        for name in ("gateway", "planner"):
            await pods[name].passes("livenessProbe")
        while (await client.get("/ready")).json()["workers"] != {"prefill": 1, "decode": 2}:  # the last one's heartbeat
            await asyncio.sleep(0.05)

        begun = [asyncio.Event() for _ in range(8)]
        first = [asyncio.create_task(ask(client, number, begun[number])) for number in range(6)]
        await asyncio.gather(*(event.wait() for event in begun[:6]))
        leaving, staying = await one_that_decodes(client, pods["decode"], pods["decode-too"])
        gone = asyncio.create_task(leaving.deleted())
        while await leaving.probed("readinessProbe"):  # it takes no more, and its answers go on
            await asyncio.sleep(0.02)
        later = [asyncio.create_task(ask(client, number, begun[number])) for number in (6, 7)]  # while it drains
        await asyncio.gather(*(event.wait() for event in begun[6:]))
        gateway_gone = asyncio.create_task(pods["gateway"].deleted())  # while both stream
        for number, tokens in enumerate(await asyncio.gather(*first, *later)):
            assert tokens == expected(release.model, [number + 1] * 40, TOKENS)
        await asyncio.gather(gone, gateway_gone)
        await asyncio.gather(*(pod.deleted() for pod in (pods["prefill"], staying, pods["planner"])))
    for pod in pods.values():
        assert "Traceback" not in pod.log, pod.log
        assert "Permissions Violation" not in pod.log, pod.log
