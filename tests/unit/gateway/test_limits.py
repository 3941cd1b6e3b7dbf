"""Tenants over HTTP: what is left of their budgets, refusals when nothing is, priorities, and who may see metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from common.errors import OverloadedError
from gateway.answers.answer import duration
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.tenants.tenants import Tenants, hash_key
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

COMPLETIONS = "/v1/completions"
ACME, FREE, ADMIN = "a-key-of-acme-itself", "a-key-without-limits", "the-admin-s-own-key"
FILE = f"""
admin_keys_sha256 = ["{hash_key(ADMIN).hex()}"]
[tenants.acme]
keys = ["{ACME}"]
requests_per_minute = 3
tokens_per_minute = 100
max_concurrent = 2
max_priority = 3
[tenants.free]
keys = ["{FREE}"]
"""
BODY: dict[str, Any] = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 10}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def gateway(tokenizer: ChatTokenizer, tmp_path: Path) -> AsyncIterator[Gateway]:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    settings = HttpSettings(tenants=Tenants(path=path))
    async with run_gateway(tokenizer, settings, key=ACME) as gateway:
        gateway.http.headers.update(bearer(ACME))
        yield gateway


async def test_answers_say_what_is_left(gateway: Gateway) -> None:
    whole = await gateway.http.post(COMPLETIONS, json=BODY)
    limits = {name: value for name, value in whole.headers.items() if name.startswith("x-ratelimit-")}
    resets = [limits.pop(f"x-ratelimit-reset-{what}") for what in ("requests", "tokens")]
    assert limits == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "80",
    }
    assert all(re.fullmatch(r"\d+s", reset) for reset in resets)
    streamed = await gateway.http.post(COMPLETIONS, json=BODY | {"stream": True, "n": 2})
    assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
    assert streamed.headers["x-ratelimit-remaining-tokens"] == "50"  # the prompt once, the answers twice
    free = await gateway.http.post(COMPLETIONS, json=BODY, headers=bearer(FREE))
    assert not any(name.startswith("x-ratelimit-") for name in free.headers)


async def test_who_has_nothing_left_is_told_when_to_come_back(gateway: Gateway) -> None:
    for _ in range(3):
        assert (await gateway.http.post(COMPLETIONS, json=BODY)).status_code == 200
    with pytest.raises(openai.RateLimitError) as raised:
        await gateway.openai.completions.create(**BODY)
    headers = raised.value.response.headers
    assert raised.value.code == "rate_limit_exceeded"
    assert "3 requests a minute" in raised.value.message
    assert 15 <= int(headers["retry-after"]) <= 20
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert len(gateway.script.submitted) == 3
    metrics = (await gateway.http.get("/metrics", headers=bearer(ADMIN))).text
    assert f'baton_refusals_total{{model_name="{MODEL}",reason="budget: requests"}} 1.0' in metrics


async def test_unused_tokens_come_back_and_what_was_not_admitted_is_free(gateway: Gateway) -> None:
    gateway.script.refuse = OverloadedError("full")
    assert (await gateway.http.post(COMPLETIONS, json=BODY | {"max_tokens": 90})).status_code == 429
    gateway.script.refuse = None
    gateway.script.script = lambda spec: [7, *gateway.tokenizer.eos_ids]
    first = await gateway.http.post(COMPLETIONS, json=BODY | {"max_tokens": 90})
    assert first.headers["x-ratelimit-remaining-tokens"] == "0"
    second = await gateway.http.post(COMPLETIONS, json=BODY | {"max_tokens": 70})  # 12 of 100 were used
    assert second.status_code == 200, second.text
    third = await gateway.http.post(COMPLETIONS, json=BODY | {"max_tokens": 90})
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert "100 tokens a minute" in third.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_place_is_free_again_however_a_request_ends(gateway: Gateway, stream: bool) -> None:
    script, body = gateway.script, BODY | {"stream": stream, "max_tokens": 2}
    script.hold_after = 0
    calls = [asyncio.create_task(gateway.http.post(COMPLETIONS, json=body)) for _ in range(2)]
    await script.until(lambda: len(script.running) == 2)
    refused = await gateway.http.post(COMPLETIONS, json=body)
    assert refused.status_code == 429
    assert "2 requests at a time" in refused.json()["error"]["message"]
    calls[0].cancel()  # this client hangs up
    await script.until(lambda: len(script.running) == 1)
    script.hold_after = None
    assert (await gateway.http.post(COMPLETIONS, json=body)).status_code == 200
    script.release.set()
    assert (await calls[1]).status_code == 200


async def test_priority_is_bounded_by_the_key(gateway: Gateway) -> None:
    refused = await gateway.http.post(COMPLETIONS, json=BODY | {"priority": 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert "at most 3" in refused.json()["error"]["message"]
    assert (await gateway.http.post(COMPLETIONS, json=BODY | {"priority": 3})).status_code == 200
    [spec] = gateway.script.submitted
    assert (spec.origin.tenant.name, spec.priority) == ("acme", 3)


async def test_what_tells_of_all_tenants_needs_the_admin_key(gateway: Gateway) -> None:
    for path in ("/metrics", "/debug/requests", "/debug/requests/x", "/admin", "/admin/anything"):
        for key in (ACME, "nonsense"):
            response = await gateway.http.get(path, headers=bearer(key))
            assert response.status_code == 401, path
            assert "admin key" in response.json()["error"]["message"]
        assert (await gateway.http.get(path, headers=bearer(ADMIN))).status_code in (200, 404)
    assert (await gateway.http.get("/v1/models", headers=bearer(ADMIN))).status_code == 401  # it is nobody's API key
    assert (await gateway.http.get("/v1/models")).status_code == 200


async def test_all_choices_are_submitted_as_one(gateway: Gateway) -> None:
    gateway.script.refuse = OverloadedError("full", retry_after_s=2.2)
    response = await gateway.http.post(COMPLETIONS, json=BODY | {"n": 3})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert gateway.script.submitted == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.02, "20ms"), (1, "1s"), (6.2, "7s"), (60, "1m0s"), (361, "6m1s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
