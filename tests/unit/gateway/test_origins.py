"""Web pages: none gets at a gateway without keys unless its origin is let in, and no other name reads anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from common.peers import Peers
from common.settings import ConfigError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.console.control import FleetControl
from gateway.http.application import WebAccess
from gateway.tenants.tenants import Tenants
from services.gateway.settings import GatewaySettings
from services.runtime.loading import load_settings
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, TEXT

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 4})
JSON = {"content-type": "application/json"}
EVIL, FRIEND, OWN = "https://evil.example", "https://friend.example", "http://localhost:8000"
KEY = "k" * 20
CROSS = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "empty"}


def client_of(
    tokenizer: ChatTokenizer, *, keys: tuple[str, ...] = (), **access: Any
) -> tuple[httpx.AsyncClient, ScriptedGenerations]:
    script = ScriptedGenerations(lambda spec: [*tokenizer.encode(TEXT), *tokenizer.eos_ids])
    app = create_app(
        generations=script,
        catalogue=script.catalogue(tokenizer),
        settings=HttpSettings(tenants=Tenants(api_keys=keys), web=WebAccess(**access)),
        control=FleetControl(None, Peers()),  # type: ignore[arg-type] - it is not started
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000", verify=False), script


@pytest.fixture
async def without_keys(tokenizer: ChatTokenizer) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedGenerations]]:
    client, script = client_of(tokenizer, origins=(FRIEND,), hosts=("gpu.example",))
    async with client:
        yield client, script


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON | {"origin": EVIL}, 403),
        (JSON | {"origin": "null"}, 403),
        (JSON | {"origin": "http://localhost:3000"}, 403),
        (JSON | {"origin": "http://localhost"}, 403),
        (JSON | {"origin": OWN + ".evil.example"}, 403),
        (JSON | {"origin": ""} | CROSS, 403),
        (JSON | CROSS | {"sec-fetch-site": "same-site"}, 403),
        (JSON | CROSS | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 403),
        (JSON | {"origin": OWN} | CROSS, 403),  # its own page is no other site's
        (JSON | {"origin": OWN, "sec-fetch-site": "same-site"}, 403),
        (JSON | {"origin": "https://localhost:8000"} | CROSS, 403),
        ({"origin": EVIL, "content-type": "text/plain"}, 403),
        ({"origin": OWN, "content-type": "text/plain;charset=UTF-8"}, 415),
        ({"content-type": "Text/Plain; x=application/json"}, 415),
        (JSON | {"host": "rebound.example"}, 403),
        (JSON | {"host": "rebound.example:8000", "origin": "http://rebound.example:8000"}, 403),
        (JSON | {"host": "localhost.evil.example"}, 403),
        (JSON | {"host": "10.1.2.3:8000"}, 403),
        (JSON | {"host": "evillocalhost"}, 403),
        (JSON, 200),
        ({}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        (JSON | {"origin": OWN, "sec-fetch-site": "same-origin"}, 200),
        (JSON | {"origin": OWN, "sec-fetch-site": "none"}, 200),
        (JSON | {"origin": OWN}, 200),
        (JSON | {"origin": FRIEND} | CROSS, 200),
        (JSON | {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
        (JSON | {"host": "[::1]:8000"}, 200),
        (JSON | {"host": "LocalHost."}, 200),
        (JSON | {"host": "baton.localhost:1"}, 200),
        (JSON | {"host": "GPU.example:8000"}, 200),
        (JSON | {"host": ""}, 200),
    ],
)  # fmt: skip
async def test_who_may_make_a_gateway_without_keys_compute(
    without_keys: tuple[httpx.AsyncClient, ScriptedGenerations], headers: dict[str, str], status: int
) -> None:
    client, script = without_keys
    answer = await client.post(COMPLETIONS, content=BODY, headers=headers)
    assert answer.status_code == status
    assert bool(script.submitted) == (status == 200)
    if status == 403:
        assert answer.json()["error"]["code"] == "forbidden"
        assert "--allowed-hosts" in answer.text or "--cors-origins" in answer.text
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("second", [OWN, FRIEND, EVIL])
@pytest.mark.parametrize("keys", [(), (KEY,)])
async def test_two_origins_are_none(tokenizer: ChatTokenizer, keys: tuple[str, ...], second: str) -> None:
    client, script = client_of(tokenizer, keys=keys, origins=(FRIEND,))
    async with client:
        headers = [("origin", OWN), ("origin", second), ("authorization", f"Bearer {KEY}"), *JSON.items()]
        answer = await client.post(COMPLETIONS, content=BODY, headers=headers)
    assert answer.status_code == 400
    assert "several Origin headers" in answer.text
    assert "access-control-allow-origin" not in answer.headers
    assert script.submitted == []


PATHS = ["/v1/models", "/console/state", "/metrics", "/debug/requests", "/openapi.json", "/health", "/", "/nowhere"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers", [{"host": "rebound.example"}, {"origin": EVIL}, CROSS], ids=["rebound", "origin", "cross"]
)
async def test_other_pages_read_nothing(
    without_keys: tuple[httpx.AsyncClient, ScriptedGenerations], path: str, headers: dict[str, str]
) -> None:
    answer = await without_keys[0].get(path, headers=headers)
    assert answer.status_code == 403
    assert answer.headers["x-request-id"]


async def test_a_link_to_the_console_may_be_followed_but_not_framed(
    without_keys: tuple[httpx.AsyncClient, ScriptedGenerations],
) -> None:
    link = CROSS | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert (await without_keys[0].get("/", headers=link)).status_code == 200
    assert (await without_keys[0].get("/", headers=link | {"sec-fetch-dest": "iframe"})).status_code == 403


def preflight(origin: str, **more: str) -> dict[str, str]:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    return {"origin": origin} | asked | more


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["without keys", "with keys"])
async def test_a_page_that_is_let_in_gets_its_preflight_and_its_answers(
    tokenizer: ChatTokenizer, keys: tuple[str, ...]
) -> None:
    client, _ = client_of(tokenizer, keys=keys, origins=(FRIEND,))
    async with client:
        before = await client.options(COMPLETIONS, headers=preflight(FRIEND))
        assert (before.status_code, before.content) == (204, b"")
        assert before.headers["access-control-allow-origin"] == FRIEND
        assert before.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "POST" in before.headers["access-control-allow-methods"]
        key = {"authorization": f"Bearer {KEY}"} if keys else {}
        for body, status in ((BODY, 200), ("{}", 400)):
            answer = await client.post(COMPLETIONS, content=body, headers=JSON | key | CROSS | {"origin": FRIEND})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == FRIEND
            assert answer.headers["vary"] == "origin"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await client.options(COMPLETIONS, headers=preflight(EVIL))
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)


async def test_with_keys_the_key_decides(tokenizer: ChatTokenizer) -> None:
    client, _ = client_of(tokenizer, keys=(KEY,))
    headers = {"origin": EVIL, "host": "any.example", "content-type": "text/plain"}
    async with client:
        assert (await client.post(COMPLETIONS, content=BODY, headers=headers)).status_code == 401
        for name, value in (("authorization", f"Bearer {KEY}"), ("x-api-key", KEY), ("api-key", KEY)):
            answer = await client.post(COMPLETIONS, content=BODY, headers=headers | {name: value})
            assert answer.status_code == 200, name
            assert "access-control-allow-origin" not in answer.headers
        wrong = headers | {"authorization": "Bearer wrong", "x-api-key": KEY}
        assert (await client.post(COMPLETIONS, content=BODY, headers=wrong)).status_code == 401


async def test_any_page_may_be_let_in(tokenizer: ChatTokenizer) -> None:
    client, _ = client_of(tokenizer, origins=("*",))
    async with client:
        answer = await client.post(COMPLETIONS, content=BODY, headers=JSON | CROSS | {"origin": EVIL})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, EVIL)
        rebound = {"host": "rebound.example", "origin": "http://rebound.example"}
        assert (await client.post(COMPLETIONS, content=BODY, headers=JSON | rebound)).status_code == 403


@pytest.mark.parametrize(
    ("bound", "host", "answers"),
    [
        ("127.0.0.1", "192.168.0.7", False),
        ("0.0.0.0", "192.168.0.7", True),
        ("0.0.0.0", "rebound.example", False),
        ("::", "[fd00::7]:80", True),
        ("192.168.0.7", "192.168.0.7:8000", True),
        ("192.168.0.7", "192.168.0.8:8000", False),
        ("localhost", "127.0.0.1", True),
    ],
)  # fmt: skip
def test_the_names_of_a_gateway_follow_its_address(bound: str, host: str, answers: bool) -> None:
    assert WebAccess(bound=bound).answers_to(host) is answers


def test_the_settings_say_who_is_let_in() -> None:
    read = load_settings(
        GatewaySettings, command="gateway", arguments=["--cors-origins", f"{FRIEND}, null", "--allowed-hosts", "A.b,c"]
    )
    assert read.web() == WebAccess(origins=(FRIEND, "null"), bound="127.0.0.1", hosts=("a.b", "c"))


@pytest.mark.parametrize(
    "wrong", ["friend.example", "https://friend.example/", "https://Friend.example", "https://a b"]
)
def test_what_is_no_origin_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins"):
        load_settings(GatewaySettings, command="gateway", arguments=["--cors-origins", wrong])
