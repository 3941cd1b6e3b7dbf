"""Ollama's pull, create, copy and delete: two gateways over a real NATS, and a stand-in of the hub."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common.settings import ROOT
from common.wire import NatsSettings, Wire
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.tenants.kept import KeptKeys
from gateway.tenants.tenants import Tenants
from services.gateway.kept import KeptFiles
from services.runtime import hub as names
from services.runtime.servers import Server, run_nats
from tests.fakes.generations import ScriptedGenerations
from tests.hub import Hub, hub_served
from tests.integration.waiting import eventually
from tests.models import TOOL_TEMPLATE, TOOL_TOKENS, build_tokenizer

ADMIN, USER = "an-admin-key-of-a-test", "a-users-key-of-a-test"
FILES = {
    name: (ROOT / "demo" / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
}
WEIGHTS = (ROOT / "demo" / "model.safetensors").read_bytes()
MARIO: dict[str, Any] = {
    "model": "mario",
    "from": "old",
    "system": "You are Mario.",
    "parameters": {"temperature": 0.5, "stop": ["END"], "num_predict": 7, "seed": 3, "num_ctx": 8192},
    "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mario!"}],
}


@dataclass
class Gateway:
    http: httpx.AsyncClient
    script: ScriptedGenerations
    tokenizer: ChatTokenizer

    async def asked(self, path: str, method: str = "POST", key: str = ADMIN, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.request(method, path, json=body, headers=headers)

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.script.submitted[-1].token_ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder, template=TOOL_TEMPLATE, added=TOOL_TOKENS)
    return ChatTokenizer(folder)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with run_nats(data_dir=tmp_path / "nats") as running:
        yield running


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_served() as hub:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        hub.add("org/demo", FILES | {"model.safetensors": WEIGHTS})
        yield hub


@contextlib.asynccontextmanager
async def gateway(server: Server, tokenizer: ChatTokenizer, name: str) -> AsyncIterator[Gateway]:
    """A gateway of the models `old` and `new`, without workers."""
    wire, tenants = Wire(), Tenants(admin_key=ADMIN, api_keys=[USER])
    keys = KeptKeys(wire, tenants, gateway_id=name, incarnation=1)
    script = ScriptedGenerations(lambda _: [*tokenizer.encode("two"), *tokenizer.eos_ids])
    script.max_model_len = 4096
    app = create_app(
        generations=script,
        catalogue=script.catalogue(tokenizer, name="old", also=["new"]),
        settings=HttpSettings(tenants=tenants),
        keys=keys,
        files=KeptFiles(),
    )
    await wire.open(NatsSettings(url=server.url), name=name)
    async with (
        keys.following(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as http,
    ):
        yield Gateway(http, script, tokenizer)
    await wire.leave()


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_made_model_brings_its_words_and_parameters_at_every_gateway(
    server: Server, tokenizer: ChatTokenizer
) -> None:
    async with gateway(server, tokenizer, "g0") as here, gateway(server, tokenizer, "g1") as there:
        made = await here.asked("/api/create", **MARIO)
        assert lines(made)[-1] == {"status": "success"}

        async def is_there() -> bool:
            return (await there.asked("/api/show", key=USER, model="mario")).status_code == 200

        await eventually(is_there)
        shown = (await there.asked("/api/show", key=USER, model="mario:latest")).json()
        assert shown["system"] == "You are Mario."
        assert {"temperature 0.5", "seed 3", "num_predict 7", 'stop "END"'} <= set(shown["parameters"].splitlines())
        assert 'SYSTEM "You are Mario."\nMESSAGE user "Who?"' in shown["modelfile"]

        said = [{"role": "user", "content": "Hello"}]
        for path in ("/api/chat", "/v1/chat/completions"):
            answer = await there.asked(path, key=USER, model="mario", messages=said, stream=False)
            assert answer.status_code == 200, answer.text
            spec = there.script.submitted[-1]
            assert (spec.model, spec.sampling.temperature, spec.sampling.max_tokens) == ("old", 0.5, 7)
            places = [there.prompt.index(text) for text in ("You are Mario.", "Who?", "Mario!", "Hello")]
            assert places == sorted(places)
        seeds = {there.script.submitted[at].sampling.seed for at in (-1, -2)}
        assert seeds == {3}
        own = [{"role": "system", "content": "You are Luigi."}, *said]
        options = {"temperature": 0.25, "num_predict": 9}
        await there.asked("/api/chat", key=USER, model="mario", messages=own, stream=False, options=options)
        assert "Luigi" in there.prompt
        assert "You are Mario" not in there.prompt
        sampling = there.script.submitted[-1].sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.25, 9)

        assert (await there.asked("/api/copy", source="mario", destination="luigi")).status_code == 200
        again = {"model": "luigi", "from": "luigi", "parameters": {"temperature": 1.5}}
        lines(await there.asked("/api/create", **again))
        shown = (await there.asked("/api/show", key=USER, model="luigi")).json()
        assert shown["system"] == "You are Mario."
        assert {"temperature 1.5", "seed 3"} <= set(shown["parameters"].splitlines())
        assert (await there.asked("/api/delete", "DELETE", model="mario:latest")).status_code == 200
        assert (await there.asked("/api/show", key=USER, model="mario")).status_code == 404
        assert (await there.asked("/api/show", key=USER, model="luigi")).status_code == 200


async def test_a_model_is_fetched_with_progress_and_deleted_again(
    server: Server, tokenizer: ChatTokenizer, hub: Hub
) -> None:
    async with gateway(server, tokenizer, "g0") as here:
        steps = lines(await here.asked("/api/pull", model="hf.co/org/demo:latest"))
        counted = [step for step in steps if "total" in step]
        assert steps[0] == {"status": "pulling manifest"}
        assert steps[-1] == {"status": "success"}
        assert counted[-1]["completed"] == counted[-1]["total"] >= len(WEIGHTS)
        assert counted[-1]["digest"].startswith("org/demo@")
        folder = names.cached("org/demo")
        assert folder is not None
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
        whole = await here.asked("/api/pull", model="org/demo", stream=False)
        assert whole.json() == {"status": "success"}
        assert (await here.asked("/api/delete", "DELETE", model="org/demo")).status_code == 200
        assert not folder.exists()
        assert (await here.asked("/api/delete", "DELETE", model="org/demo")).status_code == 404
        missing = lines(await here.asked("/api/pull", model="org/none"))
        assert "no such model" in missing[-1]["error"]
        told = await here.asked("/api/pull", model="org/none", stream=False)
        assert (told.status_code, "no such model" in told.json()["error"]) == (404, True)


async def test_a_client_that_leaves_ends_the_download_which_goes_on_later(hub: Hub) -> None:
    hub.faults.hold["model.safetensors"] = threading.Event()
    files = KeptFiles()
    steps = files.fetch("org/demo")

    async def follow() -> None:
        async for _ in steps:
            pass

    fetching = asyncio.create_task(follow())
    assert await asyncio.to_thread(hub.halfway.wait, 60)

    unfinished = f"*/blobs/{hashlib.sha256(WEIGHTS).hexdigest()}.*"  # the others get their names meanwhile

    async def has_begun() -> bool:
        return any(file.stat().st_size for file in names.cache().glob(unfinished))

    await eventually(has_begun)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    hub.faults.hold["model.safetensors"].set()
    assert names.cached("org/demo") is None
    steps = files.fetch("org/demo")
    await follow()
    assert names.cached("org/demo") is not None
    ranges = [one["Range"] for one in hub.asked("GET", "/cdn/") if "model.safetensors" in one["path"]]
    assert ranges[0] == ""
    assert all(int(one.removeprefix("bytes=").removesuffix("-")) > 0 for one in ranges[1:])
    assert len(ranges) > 1


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("pull", {"model": "llama3.2"}, 400, "org/name"),
    ("pull", {"model": "oci://127.0.0.1:1/a/b"}, 400, "of the hub alone"),
    ("create", MARIO | {"from": "gone"}, 404, "gone"),
    ("create", {"model": "mario"}, 400, "from: is missing"),
    ("create", MARIO | {"template": "{{ .Prompt }}"}, 400, "template: templates are Jinja"),
    ("create", MARIO | {"adapters": {"a": "sha256:0"}}, 400, "adapters: "),
    ("create", MARIO | {"files": {"a.gguf": "sha256:0"}}, 400, "files: "),
    ("create", MARIO | {"quantize": "q4_K_M"}, 400, "quantize: "),
    ("create", MARIO | {"parameters": {"mirostat": 1}}, 400, "mirostat"),
    ("create", MARIO | {"parameters": {"temperature": -1}}, 400, "temperature"),
    ("create", MARIO | {"model": "new"}, 409, "served model's name"),
    ("create", MARIO | {"system": "x" * 40_000}, 409, "32768 are allowed"),
    ("copy", {"source": "old", "destination": "a b"}, 400, "can't be a model's name"),
    ("copy", {"source": "gone", "destination": "b"}, 404, "gone"),
    ("delete", {"model": "old"}, 409, "is served"),
]


async def test_what_can_t_be_done_is_refused_by_name(server: Server, tokenizer: ChatTokenizer) -> None:
    async with gateway(server, tokenizer, "g0") as here:
        for path, body, status, told in WRONG:
            method = "DELETE" if path == "delete" else "POST"
            answer = await here.asked(f"/api/{path}", method, **body)
            assert (answer.status_code, told in answer.json()["error"]) == (status, True), answer.text
            without = await here.asked(f"/api/{path}", method, key=USER, **body)
            assert without.status_code in (400, 401)


async def test_only_an_admin_key_changes_models(server: Server, tokenizer: ChatTokenizer, hub: Hub) -> None:
    async with gateway(server, tokenizer, "g0") as here:
        cases: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", "/api/pull", {"model": "org/demo"}),
            ("POST", "/api/create", MARIO),
            ("POST", "/api/copy", {"source": "old", "destination": "x"}),
            ("DELETE", "/api/delete", {"model": "org/demo"}),
        ]
        for key, told in ((USER, "admin key"), ("", "API key"), ("wrong", "API key")):
            for method, path, body in cases:
                answer = await here.asked(path, method, key=key, **body)
                assert answer.status_code == 401, (path, answer.text)
                assert told in answer.json()["error"]
        assert (await here.asked("/api/pull", key=USER, model="old", stream=False)).json() == {"status": "success"}
        assert hub.requests == []
