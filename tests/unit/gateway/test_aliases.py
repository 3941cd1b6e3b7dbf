"""Aliases: a model answers to further names, and says the one that was asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from common.settings import ConfigError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.batches.lines import LineChecker
from services.gateway.settings import GatewaySettings
from services.runtime.loading import load_settings
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

OTHER = "other"  # its label would be that of unknown names
ALIASES = {"gpt-4o": MODEL, "tgi": OTHER}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
async def named(tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    catalogue = partial(ScriptedGenerations.catalogue, tokenizer=tokenizer, name=OTHER, also=[MODEL], aliases=ALIASES)
    async with run_gateway(tokenizer, HttpSettings(), catalogue=catalogue) as gateway:
        yield gateway


async def test_an_alias_is_answered_by_its_model_under_its_own_name(named: Gateway) -> None:
    whole = await named.openai.chat.completions.create(model="gpt-4o", messages=HELLO)
    stream = await named.openai.completions.create(model="gpt-4o", prompt="Hello", stream=True)
    assert {whole.model, *[chunk.model async for chunk in stream]} == {"gpt-4o"}
    assert [spec.model for spec in named.script.submitted[-2:]] == [MODEL, MODEL]


async def test_each_name_is_listed_and_its_root_is_the_model(named: Gateway) -> None:
    cards = (await named.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [
        (OTHER, OTHER), (MODEL, MODEL), ("gpt-4o", MODEL), ("tgi", OTHER),
    ]  # fmt: skip
    assert (await named.http.get("/v1/models/tgi")).json()["root"] == OTHER
    unknown = (await named.http.get("/v1/models/gpt-5")).json()["error"]
    assert (unknown["code"], "'gpt-4o', 'tgi'" in unknown["message"]) == ("model_not_found", True)


async def test_metrics_know_the_models_own_names_alone(named: Gateway) -> None:
    async def count(text: str) -> float:
        lines = (await named.http.get("/metrics")).text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(text)), 0.0)

    answered = f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}}'
    refused = f'baton_request_errors_total{{code="invalid_request",model_name="{MODEL}"}}'
    before = await count(answered), await count(refused)
    await named.openai.chat.completions.create(model="gpt-4o", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        await named.openai.chat.completions.create(model="gpt-4o", messages=HELLO, logit_bias={"999999": 1})
    assert (await count(answered), await count(refused)) == (before[0] + 1, before[1] + 1)
    assert "gpt-4o" not in (await named.http.get("/metrics")).text


async def test_a_star_is_any_other_name_and_no_name_of_the_list(tokenizer: ChatTokenizer) -> None:
    catalogue = partial(
        ScriptedGenerations.catalogue, tokenizer=tokenizer, also=[OTHER], aliases={"*": MODEL, "tgi": OTHER}
    )
    async with run_gateway(tokenizer, HttpSettings(), catalogue=catalogue) as gateway:
        asked: dict[str, httpx.Response] = {
            name: await gateway.http.post("/v1/completions", json={"model": name, "prompt": "Hello"})
            for name in ("whatever/it-is", "tgi", OTHER)
        }
        assert {name: answer.json()["model"] for name, answer in asked.items()} == {name: name for name in asked}
        assert [spec.model for spec in gateway.script.submitted] == [MODEL, OTHER, OTHER]
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        tokens = await gateway.http.post("/tokenize", json={"model": "any", "prompt": "Hello"})
    assert [card["id"] for card in listed] == [MODEL, OTHER, "tgi"]
    assert tokens.status_code == 200


def test_a_batch_may_name_an_alias(tokenizer: ChatTokenizer) -> None:
    catalogue = ScriptedGenerations(lambda _: ()).catalogue(tokenizer, aliases={"gpt-4o": MODEL})
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name}}).encode()
        for name in ("gpt-5", "gpt-4o")
    ]
    checker = LineChecker(endpoint="/v1/completions", models=catalogue)
    checker.check(b"\n".join(lines))
    assert checker.model == "gpt-4o"
    assert [error.message for error in checker.errors] == ["body.model: 'gpt-5' is not 'scripted' or 'gpt-4o'"]


def load(*arguments: str) -> GatewaySettings:
    return load_settings(
        GatewaySettings, command="gateway", arguments=[*arguments, "--served-model-name", "demo"], environment={}
    )


def test_the_flag_may_come_again_or_have_commas() -> None:
    aliases = load("--alias", "gpt-4o=demo", "--alias", "tgi = demo, *=demo").aliases
    assert aliases == {"gpt-4o": "demo", "tgi": "demo", "*": "demo"}


@pytest.mark.parametrize(
    ("alias", "told"),
    [
        ("gpt-4o", "--alias gpt-4o: write NAME=MODEL, with a served model: demo"),
        ("gpt-4o=large", "--alias gpt-4o=large: write NAME=MODEL, with a served model: demo"),
        ("=demo", "--alias =demo: write NAME=MODEL"),
        ("demo=demo", "'demo' is a served model already"),
    ],
)
def test_a_wrong_alias_stops_the_start(alias: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load("--alias", alias)
    assert told in str(raised.value)


def test_one_alias_is_no_name_of_two_models() -> None:
    with pytest.raises(ConfigError, match="'x' is a already"):
        load("--served-models", "a=demo,b=demo", "--alias", "x=a,x=b")
