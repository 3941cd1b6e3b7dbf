"""Shares of an alias's requests: by weight, tenant and header, the same at every gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from common.settings import ConfigError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.tenants.shares import Alias, Asker, Share, check_shares, chosen, read_share
from services.gateway.settings import GatewaySettings
from services.runtime.loading import load_settings
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

REQUESTS = 40_000
OTHER = "other"
WITHIN = 0.01


def parts(shares: list[Share], keys: range = range(REQUESTS)) -> dict[str, float]:
    counts = Counter(chosen("chat", shares, Asker(f"req-{key}")) for key in keys)
    return {model: count / len(keys) for model, count in counts.items()}


@pytest.mark.parametrize("percents", [(95, 5), (50, 50), (99, 1), (33.33, 33.33, 33.34), (10, 20, 30, 40)])
def test_each_model_gets_its_share_within_a_percent(percents: tuple[float, ...]) -> None:
    shares = [Share(model=f"m{index}", percent=percent) for index, percent in enumerate(percents)]
    found = parts(shares)
    for share in shares:
        assert abs(found[share.model] - share.percent / 100) < WITHIN


def test_a_session_stays_and_a_larger_share_takes_no_request_back() -> None:
    few, more = ([Share(model="old", percent=100 - part), Share(model="new", percent=part)] for part in (5, 20))
    for key in range(2000):
        asker = Asker(f"session-{key}")
        assert chosen("chat", few, asker) == chosen("chat", few, asker)
        if chosen("chat", few, asker) == "new":
            assert chosen("chat", more, asker) == "new"


def test_rules_come_before_weights() -> None:
    shares = [
        Share(model="new", tenant="acme"),
        Share(model="new", header="x-canary", value="yes"),
        Share(model="beta", header="x-beta"),
        Share(model="old", percent=100),
    ]
    for tenant, model in (("", "old"), ("acme", "new"), ("another", "old")):
        assert chosen("chat", shares, Asker("1", tenant)) == model
    for headers, model in (
        ({"x-canary": "yes"}, "new"),
        ({"x-canary": "no"}, "old"),
        ({"x-beta": ""}, "beta"),
    ):
        assert chosen("chat", shares, Asker("1", "", headers)) == model


@pytest.mark.parametrize(
    "text", ["new@5%", "new@0.5%", "org/new:7b@tenant:acme", "new@header:x-canary:a:b", "n@header:x"]
)
def test_a_share_is_written_as_it_is_read(text: str) -> None:
    assert read_share(text).written() == text


@pytest.mark.parametrize(
    "text", ["new@", "new@5", "@5%", "new@0%", "new@101%", "new@nan%", "new@tenant:", "new@what:x"]
)
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not like MODEL@5%"):
        read_share(text)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([Share(model="old", percent=95)], "the parts are 95 % in all"),
        ([Share(model="new", tenant="acme")], "the parts are 0 % in all"),
        ([Share(model="old", percent=50), Share(model="old", percent=50)], "two parts"),
        ([Share(model="gone", percent=100)], "'gone' is not served"),
        ([Share(model="old", percent=100, tenant="x")], "give one of percent, tenant and header"),
        ([Share(model="old", percent=110), Share(model="new", percent=-10)], "each above 0"),
        ([Share(model="old", percent=100), Share(model="new", header="X-A")], "write it in lower case"),
    ],
)
def test_shares_that_leave_requests_over_are_refused(shares: list[Share], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_shares(shares, ("old", "new"))


def load(*aliases: str) -> dict[str, Alias]:
    arguments = ["--served-models", "old=demo,new=demo", *(part for alias in aliases for part in ("--alias", alias))]
    return load_settings(GatewaySettings, command="gateway", arguments=arguments, environment={}).aliases


def test_settings_share_an_alias_out() -> None:
    found = load("chat=old@95%", "chat=new@5%", "chat=new@tenant:acme", "plain=old")
    assert found["plain"] == "old"
    shares = [Share(model="old", percent=95), Share(model="new", percent=5), Share(model="new", tenant="acme")]
    assert found["chat"] == tuple(shares)


@pytest.mark.parametrize(
    ("aliases", "told"),
    [
        (("chat=old@95%",), "--alias chat: the parts are 95 % in all"),
        (("chat=old", "chat=new@5%"), "'old' has no share: write chat=old@90%"),
        (("chat=new@5%", "chat=old"), "'old' has no share: write chat=old@90%"),
        (("old=new@100%",), "'old' is a served model already"),
        (("chat=gone@100%",), "'gone' is not served: name one of 'old', 'new'"),
        (("chat=old@x%",), "--alias chat=old@x%: 'old@x%' is not like"),
    ],
)
def test_shares_that_settings_get_wrong_stop_the_start(aliases: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(*aliases)
    assert told in str(raised.value)


@pytest.fixture(scope="module")
async def gateway(tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    shares = (Share(model=MODEL, percent=50), Share(model=OTHER, percent=50), Share(model=OTHER, header="x-canary"))
    catalogue = partial(ScriptedGenerations.catalogue, tokenizer=tokenizer, also=[OTHER], aliases={"chat": shares})
    async with run_gateway(tokenizer, HttpSettings(), catalogue=catalogue) as gateway:
        yield gateway


async def test_an_answer_says_which_model_gave_it_and_metrics_count_it(gateway: Gateway) -> None:
    body = {"model": "chat", "prompt": "Hello", "max_tokens": 1}
    seen = Counter[str]()
    for number in range(40):
        answer = await gateway.http.post("/v1/completions", json=body, headers={"x-request-id": f"r-{number}"})
        assert (answer.status_code, answer.json()["model"]) == (200, "chat")
        assert answer.headers["x-baton-model"] == gateway.script.submitted[-1].model
        seen[answer.headers["x-baton-model"]] += 1
    assert seen.keys() == {MODEL, OTHER}
    metrics = (await gateway.http.get("/metrics")).text
    for model, count in seen.items():
        assert f'baton_alias_requests_total{{alias="chat",model_name="{model}"}} {float(count)}' in metrics


async def test_a_header_and_a_session_decide(gateway: Gateway) -> None:
    body: dict[str, Any] = {"model": "chat", "prompt": "Hello", "max_tokens": 1}

    async def model(**headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await gateway.http.post("/v1/completions", json=body, headers=named)
        return answer.headers["x-baton-model"]

    assert {await model(x_canary="1") for _ in range(5)} == {OTHER}
    for session in range(4):
        assert len({await model(x_session_id=f"s{session}") for _ in range(4)}) == 1
    plain = await gateway.http.post("/v1/completions", json=body | {"model": MODEL})
    assert "x-baton-model" not in plain.headers
