"""Aliases set through one gateway and valid at all: two gateways over a real NATS."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common.wire import NatsSettings, Wire
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.tenants.kept import KeptKeys
from gateway.tenants.tenants import Tenants
from services.runtime.servers import Server, run_nats
from tests.fakes.generations import ScriptedGenerations
from tests.integration.waiting import eventually

ADMIN = "an-admin-key-of-a-test"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}
HALF = [{"model": "old", "percent": 50}, {"model": "new", "percent": 50}]


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with run_nats(data_dir=tmp_path / "nats") as running:
        yield running


@contextlib.asynccontextmanager
async def gateway(server: Server, tokenizer: ChatTokenizer, name: str) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway of the models `old` and `new`, with the configured alias `chat` for the first, without workers."""
    wire, tenants = Wire(), Tenants(admin_key=ADMIN)
    keys = KeptKeys(wire, tenants, gateway_id=name, incarnation=1)
    script = ScriptedGenerations(lambda _: tokenizer.encode("two"))
    catalogue = script.catalogue(tokenizer, name="old", also=["new"], aliases={"chat": "old"})
    app = create_app(generations=script, catalogue=catalogue, settings=HttpSettings(tenants=tenants), keys=keys)
    await wire.open(NatsSettings(url=server.url), name=name)
    transport = httpx.ASGITransport(app)
    async with (
        keys.following(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=AS_ADMIN) as http,
    ):
        yield http
    await wire.leave()


async def shares(http: httpx.AsyncClient, name: str = "chat") -> list[dict[str, Any]] | None:
    listed = (await http.get("/admin/aliases")).json()["aliases"]
    return next((one["shares"] for one in listed if one["name"] == name), None)


async def test_shares_hold_at_every_gateway_and_go_back_by_one_call(server: Server, tokenizer: ChatTokenizer) -> None:
    async with gateway(server, tokenizer, "g0") as here, gateway(server, tokenizer, "g1") as there:
        whole = [{"model": "old", "percent": 100.0}]
        assert await shares(there) == whole
        assert (await here.post("/admin/aliases", json={"name": "chat", "shares": HALF})).status_code == 200

        async def are(expected: list[dict[str, Any]] | None) -> bool:
            return await shares(there) == expected

        await eventually(lambda: are(HALF))
        back = await there.post("/admin/aliases/rollback", json={"name": "chat"})
        assert back.json()["shares"] == whole
        assert await shares(there) == whole
        await there.post("/admin/aliases/rollback", json={"name": "chat"})
        assert await shares(there) == HALF
        assert (await here.delete("/admin/aliases/chat")).json() == {"name": "chat", "deleted": True}
        await eventually(lambda: are(whole))  # what settings say
        added = {"name": "org/x:7b", "shares": [{"model": "new", "percent": 100}]}
        assert (await here.post("/admin/aliases", json=added)).status_code == 200
        cards = (await here.get("/v1/models")).json()["data"]
        assert ("org/x:7b", "new") in [(card["id"], card["root"]) for card in cards]
        assert (await here.delete("/admin/aliases/org/x:7b")).status_code == 200
    async with gateway(server, tokenizer, "g2") as later:
        assert await shares(later) == whole


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "told"),
    [
        ("POST", "", {"name": "chat", "shares": [{"model": "old", "percent": 90}]}, 400, "90 % in all"),
        ("POST", "", {"name": "chat", "shares": [{"model": "gone", "percent": 100}]}, 400, "'gone' is not served"),
        ("POST", "", {"name": "old", "shares": HALF}, 409, "served model's name"),
        ("POST", "", {"name": "a b", "shares": HALF}, 400, "name"),
        ("POST", "", {"name": "chat", "shares": []}, 400, "shares"),
        ("POST", "/rollback", {"name": "chat"}, 404, "no earlier shares"),
        ("DELETE", "/chat", None, 404, "was set"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    server: Server, tokenizer: ChatTokenizer, method: str, path: str, body: Any, status: int, told: str
) -> None:
    async with gateway(server, tokenizer, "g0") as http:
        answer = await http.request(method, f"/admin/aliases{path}", json=body)
        assert answer.status_code == status, answer.text
        assert told in answer.text
        without_key = await http.request(method, f"/admin/aliases{path}", json=body, headers={"authorization": ""})
        assert without_key.status_code == 401
