"""A dialect is one entry: routes, keys, errors, traces, OpenAPI and batches follow from it, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import OverloadedError, WorkerFailedError
from common.tracing import NoTracer, Span
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.dialects import DIALECTS
from gateway.dialects.table import DialectTable
from gateway.tenants.tenants import Tenants
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway, run_gateway
from tests.unit.gateway.tiny_dialect import LINES, NAMES, SAY, TINY

SECRET = "the-key-of-a-tiny-client"
HEADERS = {"x-tiny-key": SECRET}
BODY: dict[str, Any] = {"model": MODEL, "text": "Hello"}
CHAT = "/v1/chat/completions"


class Recorder(NoTracer):
    """A tracer that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def wants(self, context: str) -> bool:
        return bool(context)

    def record(self, span: Span) -> None:
        self.spans.append(span)


@pytest.fixture
def tracer() -> Recorder:
    return Recorder()


@pytest.fixture
async def gateway(tokenizer: ChatTokenizer, tracer: Recorder) -> AsyncIterator[Gateway]:
    settings = HttpSettings(tenants=Tenants(api_keys=[SECRET]))
    async with run_gateway(tokenizer, settings, key=SECRET, dialects=(*DIALECTS, TINY), tracer=tracer) as gateway:
        gateway.http.headers.update(HEADERS)
        yield gateway


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_an_answer_is_written_by_the_dialect_of_its_path(gateway: Gateway) -> None:
    answer = await gateway.http.post(SAY, json=BODY)
    assert (answer.status_code, answer.json()) == (200, {"said": [TEXT]})
    assert gateway.script.submitted[-1].request_id.startswith("tiny-")
    assert (await gateway.http.get(NAMES)).json() == {"names": [MODEL]}


async def test_a_stream_has_the_dialect_s_type_and_form(gateway: Gateway) -> None:
    answer = await gateway.http.post(SAY, json=BODY | {"flowing": True})
    *parts, last = lines(answer.text)
    assert answer.headers["content-type"].partition(";")[0] == LINES
    assert "".join(part["part"] for part in parts) == TEXT
    assert last == {"used": len(gateway.tokenizer.encode(TEXT)) + 1}
    assert gateway.script.running == {}


async def test_errors_before_a_stream_have_the_dialect_s_form_and_its_names(gateway: Gateway) -> None:
    wrong = {
        "no_such": ({"no_such": 1}, 400, "no_such"),
        "a model": ({"model": "other"}, 404, "model"),
        "too long": ({"words": 10_000}, 400, "words"),
        "no prompt": ({"text": "x" * 10_000}, 400, "text"),
    }
    for fields, status, field in wrong.values():
        answer = await gateway.http.post(SAY, json=BODY | fields | {"flowing": True})
        assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
        assert answer.json().keys() == {"trouble", "field"}
    gateway.script.refuse = OverloadedError("full", retry_after_s=7)
    answer = await gateway.http.post(SAY, json=BODY)
    assert (answer.status_code, answer.json()["trouble"], answer.headers["retry-after"]) == (429, "full", "7")
    metrics = (await gateway.http.get("/metrics", headers={"authorization": f"Bearer {SECRET}"})).text
    assert f'baton_refusal_seconds_count{{model_name="{MODEL}",when="at once"}} 1.0' in metrics


@pytest.mark.parametrize("error", [WorkerFailedError("broke"), ZeroDivisionError("a bug")], ids=["ours", "a bug"])
async def test_an_error_in_a_stream_is_its_last_line(gateway: Gateway, error: Exception) -> None:
    gateway.script.fail, gateway.script.fail_after = error, 2
    answer = await gateway.http.post(SAY, json=BODY | {"flowing": True})
    said = lines(answer.text)
    assert said[-1] == {"trouble": "broke" if isinstance(error, WorkerFailedError) else "internal error"}
    assert all("part" in line for line in said[:-1])
    whole = await gateway.http.post(SAY, json=BODY)
    assert (whole.status_code, whole.json()) == (500, said[-1] | {"field": None})
    assert gateway.script.running == {}


async def test_a_key_is_read_and_asked_for_as_the_dialect_says(gateway: Gateway) -> None:
    bearer = {"authorization": f"Bearer {SECRET}", "x-tiny-key": ""}
    refused = await gateway.http.post(SAY, json=BODY, headers=bearer)
    assert refused.status_code == 401
    assert refused.json() == {"trouble": "a valid API key is needed: send `x-tiny-key: KEY`", "field": None}
    assert "www-authenticate" not in refused.headers
    other = await gateway.http.get("/v1/models", headers={"authorization": ""})
    assert other.json()["error"]["code"] == "invalid_api_key"
    assert (await gateway.http.get("/v1/models", headers=bearer)).status_code == 200


async def test_what_is_no_route_below_a_dialect_s_path_is_told_in_its_form(gateway: Gateway) -> None:
    for method, path, status in (("GET", SAY, 405), ("POST", f"{SAY}/nothing", 404), ("POST", NAMES, 405)):
        answer = await gateway.http.request(method, path)
        assert (answer.status_code, answer.json().keys()) == (status, {"trouble", "field"}), path
    bearer = {"authorization": f"Bearer {SECRET}"}
    elsewhere = await gateway.http.get("/tiny", headers=bearer)  # below no path of the dialect
    assert (elsewhere.status_code, elsewhere.json().keys()) == (404, {"error"})


async def test_every_path_that_generates_is_traced(gateway: Gateway, tracer: Recorder) -> None:
    await gateway.http.post(SAY, json=BODY | {"words": 3})
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    await gateway.http.post(CHAT, json=body, headers={"authorization": f"Bearer {SECRET}"})
    await gateway.http.post(SAY, json=BODY | {"model": "other"})
    await gateway.http.get(NAMES)
    names = [(span.name, span.attributes["gen_ai.operation.name"]) for span in tracer.spans]
    assert names == [(f"POST {SAY}", "say"), (f"POST {CHAT}", "chat"), (f"POST {SAY}", "say")]
    said = tracer.spans[0].attributes
    assert (said["tiny.words"], said["gen_ai.usage.output_tokens"]) == (3, 3)
    assert [span.attributes["http.response.status_code"] for span in tracer.spans] == [200, 200, 404]
    assert gateway.script.submitted[0].traceparent == tracer.spans[0].context


async def test_the_openapi_document_has_the_dialect_and_its_key(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json", headers={"authorization": f"Bearer {SECRET}"})).json()
    say = document["paths"][SAY]["post"]
    assert say["security"] == [{"key_tiny": []}]
    assert say["responses"]["200"]["content"].keys() == {"application/json", LINES}
    assert document["components"]["securitySchemes"]["key_tiny"]["name"] == "x-tiny-key"
    assert set(document["components"]["schemas"]["SayRequest"]["properties"]) == {"model", "text", "words", "flowing"}
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]


def test_a_batch_s_lines_may_ask_for_what_the_dialects_say() -> None:
    assert list(DialectTable((*DIALECTS, TINY)).batchable) == [CHAT, "/v1/completions", SAY]


def test_two_dialects_can_t_have_the_same_path() -> None:
    with pytest.raises(ValueError, match=f"{SAY}: claimed by both tiny and tiny"):
        DialectTable((TINY, TINY))
