"""Models that hosts load, as clients of other servers ask: sleep, Triton's repository, OpenAI's delete, keep_alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import UnavailableError
from common.messages import HostedModel
from common.words import HostStatus
from gateway.answers.ask import FOREVER_S
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.tenants.tenants import Tenants
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

OTHER = "other"


class Host:
    """A host of both models, which loads at once, or when a test lets it."""

    heard = True

    def __init__(self) -> None:
        self.status = dict.fromkeys((MODEL, OTHER), HostStatus.UNLOADED)
        self.active: set[str] = set()
        self.asked: list[tuple[str, str, float | None]] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.fails = ""
        self.took_s = 0.0

    def workers(self, model: str) -> dict[str, tuple[int, int | None]]:
        return {}

    def find(self, model: str) -> HostedModel | None:
        return HostedModel(status=self.status[model]) if model in self.status else None

    def must_load(self, model: str) -> bool:
        return self.status.get(model, HostStatus.READY) is not HostStatus.READY

    def is_active(self, model: str) -> bool:
        return model in self.active

    def left_s(self, model: str) -> float | None:
        return 60.0 if model in self.status else None

    def said(self, model: str) -> str:
        return f"{model}: loading, 1 s"

    async def load(self, model: str, keep_s: float | None = None) -> None:
        self.asked.append(("load", model, keep_s))
        began = time.monotonic()
        await self.may_load.wait()
        self.took_s = time.monotonic() - began
        if self.fails:
            raise UnavailableError(self.fails)
        self.status[model] = HostStatus.READY

    async def unload(self, model: str, *, parks: bool = False) -> bool:
        self.asked.append(("park" if parks else "unload", model, None))
        self.status[model] = HostStatus.UNLOADED
        return True


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
async def gateway(tokenizer: ChatTokenizer, host: Host) -> AsyncIterator[Gateway]:
    catalogue = partial(ScriptedGenerations.catalogue, tokenizer=tokenizer, also=[OTHER])
    async with run_gateway(tokenizer, HttpSettings(), catalogue=catalogue, loads=host) as gateway:
        yield gateway


async def told(http: httpx.AsyncClient, method: str, path: str, **options: Any) -> Any:
    answer = await http.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_vllms_sleep_and_wake_up(gateway: Gateway, host: Host) -> None:
    assert await told(gateway.http, "GET", "/is_sleeping") == {"is_sleeping": True}
    assert await told(gateway.http, "POST", f"/wake_up?model={OTHER}") == {}
    assert host.asked == [("load", OTHER, None)]
    assert await told(gateway.http, "GET", f"/is_sleeping?model={OTHER}") == {"is_sleeping": False}
    assert await told(gateway.http, "POST", "/wake_up?tags=weights") == {}
    assert await told(gateway.http, "POST", "/sleep?level=1") == {}
    assert await told(gateway.http, "GET", "/is_sleeping") == {"is_sleeping": True}
    assert host.asked[-2:] == [("park", MODEL, None), ("park", OTHER, None)]
    assert await told(gateway.http, "POST", f"/sleep?level=2&model={OTHER}") == {}
    assert host.asked[-1] == ("unload", OTHER, None)
    wrong = await gateway.http.post("/sleep?level=7")
    assert (wrong.status_code, "level '7': is 1" in wrong.text) == (400, True)


async def test_tritons_repository(gateway: Gateway, host: Host) -> None:
    root = f"/v2/repository/models/{OTHER}"
    assert await told(gateway.http, "POST", f"{root}/load", json={"parameters": {"config": "{}"}}) == {}
    assert host.asked == [("load", OTHER, FOREVER_S)]
    assert await told(gateway.http, "POST", f"{root}/unload") == {}
    assert host.asked[-1] == ("unload", OTHER, None)
    missing = await gateway.http.post("/v2/repository/models/gone/load")
    assert missing.status_code == 404


async def test_a_model_with_requests_is_not_unloaded(gateway: Gateway, host: Host) -> None:
    host.status[OTHER] = HostStatus.READY
    host.active.add(OTHER)
    for method, path in (
        ("DELETE", f"/v1/models/{OTHER}"),
        ("POST", f"/sleep?model={OTHER}"),
        ("POST", f"/v2/repository/models/{OTHER}/unload"),
    ):
        answer = await gateway.http.request(method, path)
        assert (answer.status_code, "has requests" in answer.text) == (409, True)
    host.active.clear()
    deleted = await told(gateway.http, "DELETE", f"/v1/models/{OTHER}")
    assert deleted == {"id": OTHER, "object": "model", "deleted": True}
    assert host.asked == [("unload", OTHER, None)]


async def test_ollamas_keep_alive_is_heeded(gateway: Gateway, host: Host) -> None:
    body = {"model": MODEL, "prompt": "Hello", "stream": False, "keep_alive": "10m"}
    answer = await gateway.http.post("/api/generate", json=body)
    assert answer.status_code == 200
    assert host.asked == [("load", MODEL, 600.0)]
    assert "keep_alive" not in answer.headers.get("x-baton-ignored-fields", "")
    unloaded = await told(
        gateway.http, "POST", "/api/generate", json={"model": MODEL, "keep_alive": 0, "stream": False}
    )
    assert unloaded["done_reason"] == "unload"
    assert host.asked[-1] == ("unload", MODEL, None)
    running = (await told(gateway.http, "GET", "/api/ps"))["models"]
    assert all(not one["expires_at"].startswith("2300") for one in running)
    wrong = await gateway.http.post("/api/generate", json=body | {"keep_alive": "soon"})
    assert (wrong.status_code, "keep_alive" in wrong.text) == (400, True)


async def test_a_stream_says_how_far_its_model_is_and_goes_on_with_the_answer(gateway: Gateway, host: Host) -> None:
    host.may_load.clear()
    body = {"model": MODEL, "prompt": "Hello", "stream": True}
    lines: list[str] = []
    async with gateway.http.stream("POST", "/v1/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            lines.append(line)
            host.may_load.set()
    assert lines[0] == f": {MODEL}: loading, 1 s"
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_the_wait_for_a_model_is_part_of_the_requests_deadline(gateway: Gateway, host: Host) -> None:
    host.may_load.clear()
    answering = asyncio.create_task(
        gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "timeout": 60})
    )
    while not host.asked:
        await asyncio.sleep(0)
    host.may_load.set()
    assert (await answering).status_code == 200
    [spec] = gateway.script.submitted
    assert 0 < spec.deadline_s <= 60 - host.took_s


async def test_a_request_whose_workers_die_before_it_starts_waits_for_the_next_ones(
    gateway: Gateway, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = gateway.script.submit

    async def dies_once(specs: Any) -> Any:
        monkeypatch.setattr(gateway.script, "submit", submit)
        host.status[MODEL] = HostStatus.LOADING
        raise UnavailableError("no decode worker is ready")

    monkeypatch.setattr(gateway.script, "submit", dies_once)
    answer = await gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "timeout": 60})
    assert answer.status_code == 200
    assert [verb for verb, *_ in host.asked] == ["load", "load"]


async def test_a_model_that_can_not_be_loaded_ends_a_stream_by_its_reason(gateway: Gateway, host: Host) -> None:
    host.fails = "no memory"
    body = {"model": MODEL, "prompt": "Hello"}
    streamed = await gateway.http.post("/v1/completions", json=body | {"stream": True})
    assert streamed.text.startswith(": ")
    assert '"message":"no memory"' in streamed.text
    whole = await gateway.http.post("/v1/completions", json=body)
    assert (whole.status_code, whole.json()["error"]["message"]) == (503, "no memory")


async def test_without_a_host_it_is_said_how_models_come(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings()) as gateway:
        for method, path in (("POST", "/sleep"), ("GET", "/is_sleeping"), ("DELETE", f"/v1/models/{MODEL}")):
            answer = await gateway.http.request(method, path)
            assert (answer.status_code, "--keep-alive" in answer.text) == (400, True), path


async def test_a_tenant_has_only_its_models_loaded_and_is_served_by_others_that_are(
    tokenizer: ChatTokenizer, host: Host, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenants.acme]\nkeys = ["the-key-of-acme-1"]\nloads = ["{OTHER}"]\n')
    catalogue = partial(ScriptedGenerations.catalogue, tokenizer=tokenizer, also=[OTHER])
    settings = HttpSettings(tenants=Tenants(path=file))
    async with run_gateway(tokenizer, settings, catalogue=catalogue, loads=host) as gateway:
        gateway.http.headers["authorization"] = "Bearer the-key-of-acme-1"
        for body in ({"stream": False}, {"stream": True}):
            refused = await gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello"} | body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            assert f"may not have model '{MODEL}' loaded" in refused.text
        assert (await gateway.http.post(f"/wake_up?model={MODEL}")).status_code == 403
        assert (await gateway.http.post(f"/sleep?model={MODEL}")).status_code == 403
        assert host.asked == []
        allowed = await gateway.http.post("/v1/completions", json={"model": OTHER, "prompt": "Hello"})
        assert allowed.status_code == 200
        host.status[MODEL] = HostStatus.READY
        served = await gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})
        assert served.status_code == 200
        assert (await gateway.http.post("/sleep")).status_code == 200
        assert [(verb, model) for verb, model, _ in host.asked if verb != "load"] == [("park", OTHER)]
