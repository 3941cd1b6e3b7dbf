"""Wishes for cached KV: what clients and tenants say of them, and what jobs carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.messages import NO_KEEP, Keep
from common.settings import ConfigError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.tenants.tenants import Tenant, Tenants
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = "chat/completions", "completions", "responses", "messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "Hello"},
    RESPONSES: {"input": "Hello"},
    ANTHROPIC: {"messages": MESSAGES, "max_tokens": 4},
}
KEY = "a-key-of-the-tenant"


async def kept(gateway: Gateway, route: str, said: dict[str, Any], headers: dict[str, str] | None = None) -> Keep:
    body = {"model": MODEL} | BODIES[route] | said
    answer = await gateway.http.post(f"/v1/{route}", json=body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    keep: Keep = gateway.script.submitted[-1].sharing.keep
    return keep


@pytest.mark.parametrize("route", BODIES)
async def test_who_says_nothing_wishes_nothing(gateway: Gateway, route: str) -> None:
    assert await kept(gateway, route, {}) == NO_KEEP


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES])
async def test_a_day_of_openai(gateway: Gateway, route: str) -> None:
    assert await kept(gateway, route, {"prompt_cache_retention": "24h"}) == Keep(ttl_s=86_400.0)
    for usual in ("in_memory", "in-memory", None):
        assert await kept(gateway, route, {"prompt_cache_retention": usual}) == NO_KEEP


def marked(ttl: str | None = None) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | more


@pytest.mark.parametrize(
    ("said", "ttl_s"),
    [
        (marked(), 300.0),
        (marked("1h"), 3600.0),
        ({"system": [text("Be brief.", **marked("1h"))]} | marked("5m"), 3600.0),
        ({"tools": [{"type": "tool_search_tool_regex", "name": "find"} | marked()]}, 300.0),
        ({"messages": [{"role": "user", "content": [text("One"), text("Two", **marked("1h"))]}]}, 3600.0),
        ({"cache_control": None}, 0.0),
    ],
    ids=str,
)
async def test_the_longest_of_anthropic_s_marks(gateway: Gateway, said: dict[str, Any], ttl_s: float) -> None:
    assert await kept(gateway, ANTHROPIC, said) == Keep(ttl_s=ttl_s)


async def test_a_session_has_the_header_s_name(gateway: Gateway) -> None:
    one = await kept(gateway, CHAT, {"prompt_cache_key": "shared"}, {"x-session-id": "one"})
    same = await kept(gateway, ANTHROPIC, {}, {"x-session-id": "one"})
    other = await kept(gateway, ANTHROPIC, {}, {"x-session-id": "two"})
    assert one == same != other
    assert one.session
    assert "one" not in one.session


async def test_a_cache_key_names_no_session(gateway: Gateway) -> None:
    assert await kept(gateway, CHAT, {"prompt_cache_key": "one"}) == Keep()


def test_a_session_is_its_tenant_s_own() -> None:
    asked = Keep(session="one")
    assert Tenant(name="a").keeps(asked, session="") != Tenant(name="b").keeps(asked, session="")


@pytest.mark.parametrize(
    ("route", "said", "param"),
    [
        (CHAT, {"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        (RESPONSES, {"prompt_cache_retention": 24}, "prompt_cache_retention"),
        (CHAT, {"prompt_cache_key": 1}, "prompt_cache_key"),
    ],
    ids=str,
)
async def test_a_wrong_wish_is_refused_by_name(gateway: Gateway, route: str, said: dict[str, Any], param: str) -> None:
    answer = await gateway.http.post(f"/v1/{route}", json={"model": MODEL} | BODIES[route] | said)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert gateway.script.submitted == []


@pytest.mark.parametrize(
    ("said", "place"),
    [
        (marked("2h"), "cache_control: ttl"),
        ({"cache_control": "ephemeral"}, "cache_control: must be"),
        ({"cache_control": {"type": "lasting"}}, "cache_control: must be"),
        ({"cache_control": {"type": "ephemeral", "ttl": ["1h"]}}, "cache_control: ttl"),
        ({"system": [text("Be brief.", **marked("never"))]}, "system: 0: cache_control: ttl"),
        ({"messages": [{"role": "user", "content": [text("Two", **marked("7"))]}]}, "messages: 0: cache_control: ttl"),
    ],
    ids=str,
)
async def test_a_wrong_mark_is_refused_with_its_place(gateway: Gateway, said: dict[str, Any], place: str) -> None:
    answer = await gateway.http.post("/v1/messages", json={"model": MODEL} | BODIES[ANTHROPIC] | said)
    assert answer.status_code == 400
    assert place in answer.json()["error"]["message"]


async def test_a_tenant_s_share_goes_with_its_requests(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants.acme]\nkeys = ["{KEY}"]\nkv_share = 0.25\n')
    async with run_gateway(tokenizer, HttpSettings(tenants=Tenants(path=path))) as gateway:
        assert await kept(gateway, CHAT, {}, {"authorization": f"Bearer {KEY}"}) == Keep(tenant="acme", share=0.25)
    path.write_text("[tenants.acme]\nkv_share = 0\n")
    with pytest.raises(ConfigError, match=r"tenants\.acme\.kv_share"):
        Tenants(path=path)
