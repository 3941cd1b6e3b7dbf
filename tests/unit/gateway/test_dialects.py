"""A dialect is one entry: routes, keys, errors, traces, OpenAPI and batches follow from it, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from common.errors import OverloadedError, WorkerFailedError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.dialects import DIALECTS
from gateway.dialects.dialect import DialectPaths
from gateway.dialects.table import DialectTable
from gateway.http.application import WebAccess
from gateway.routes import serving
from gateway.tenants.tenants import Tenants
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway, run_gateway
from tests.unit.gateway.recorder import Recorder
from tests.unit.gateway.tiny_dialect import ALIVE, COUNT, IDLE, LINES, NAMES, SAY, SAY_BY_PATH, TINY
from tests.unit.gateway.wire import wire

SECRET = "the-key-of-a-tiny-client"
HEADERS = {"x-tiny-key": SECRET}
BODY: dict[str, Any] = {"model": MODEL, "text": "Hello"}
CHAT = "/v1/chat/completions"
COUNTING, SHARED_MODEL = f"/tiny/count/{MODEL}", f"/v1/models/{MODEL}"
FORM = {"trouble", "field", "id"}  # of a tiny error
LARGEST = 100_000  # bytes of a body

LIMIT_S = 60


@pytest.fixture
def tracer() -> Recorder:
    return Recorder()


@pytest.fixture
async def gateway(tokenizer: ChatTokenizer, tracer: Recorder) -> AsyncIterator[Gateway]:
    settings = HttpSettings(tenants=Tenants(api_keys=[SECRET]), max_body_bytes=LARGEST)
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
        assert answer.json().keys() == FORM
    gateway.script.refuse = OverloadedError("full", retry_after_s=7)
    answer = await gateway.http.post(SAY, json=BODY)
    assert (answer.status_code, answer.json()["trouble"], answer.headers["retry-after"]) == (529, "full", "7")
    metrics = (await gateway.http.get("/metrics", headers={"authorization": f"Bearer {SECRET}"})).text
    assert f'baton_refusal_seconds_count{{model_name="{MODEL}",when="at once"}} 1.0' in metrics
    assert f'baton_dialect_requests_total{{dialect="tiny",path="{SAY}"}} {len(wrong) + 1}.0' in metrics


@pytest.mark.parametrize("error", [WorkerFailedError("broke"), ZeroDivisionError("a bug")], ids=["ours", "a bug"])
async def test_an_error_in_a_stream_is_its_last_line(gateway: Gateway, error: Exception) -> None:
    gateway.script.fail, gateway.script.fail_after = error, 2
    answer = await gateway.http.post(SAY, json=BODY | {"flowing": True})
    said = lines(answer.text)
    assert said[-1] == {"trouble": "broke" if isinstance(error, WorkerFailedError) else "internal error"}
    assert all("part" in line for line in said[:-1])
    whole = await gateway.http.post(SAY, json=BODY)
    assert (whole.status_code, whole.json()) == (500, said[-1] | {"field": None, "id": whole.headers["x-request-id"]})
    assert gateway.script.running == {}


async def test_a_silent_stream_says_so_in_the_dialect_s_way(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_EVENT_S", 0.01)
    gateway.script.hold_after = 3
    read = b""
    async with gateway.http.stream("POST", SAY, json=BODY | {"flowing": True}) as answer, asyncio.timeout(LIMIT_S):
        async for data in answer.aiter_bytes():
            read += data
            if read.count(IDLE) > 1:
                gateway.script.release.set()
    *said, last = [line for line in lines(read.decode()) if "idle" not in line]
    assert "".join(part["part"] for part in said) == TEXT
    assert last == {"used": len(gateway.tokenizer.encode(TEXT)) + 1}


async def test_a_client_that_sends_no_more_is_tried_with_the_dialect_s_idle_event(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "IDLE_EVENT_S", 2 * LIMIT_S)  # what every silent stream gets comes too late
    gateway.script.hold_after = 1
    body = json.dumps(BODY | {"flowing": True}).encode()
    head = f"POST {SAY} HTTP/1.1\r\nhost: localhost\r\nx-tiny-key: {SECRET}\r\ncontent-length: {len(body)}\r\n\r\n"
    async with wire(gateway) as client:
        await client.say(head.encode() + body)
        await client.until(b'{"part"')  # before the answer has begun it would be tried with `100 Continue`
        client.writer.write_eof()
        await client.until(b"%x\r\n%b\r\n" % (len(IDLE), IDLE))
    gateway.script.release.set()
    await gateway.script.until(lambda: not gateway.script.running)


async def test_a_key_is_read_and_asked_for_as_the_dialect_says(gateway: Gateway) -> None:
    bearer = {"authorization": f"Bearer {SECRET}", "x-tiny-key": ""}
    refused = await gateway.http.post(SAY, json=BODY, headers=bearer)
    assert refused.status_code == 401
    assert refused.json()["trouble"] == "a valid API key is needed: send `x-tiny-key: KEY`"
    assert "www-authenticate" not in refused.headers
    other = await gateway.http.get("/v1/models", headers={"x-tiny-key": ""})
    assert other.json()["error"]["code"] == "invalid_api_key"
    assert (await gateway.http.get("/v1/models", headers=bearer)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", SAY, 405),
        ("POST", f"{SAY}/nothing", 404),
        ("POST", NAMES, 405),
        ("GET", "/tiny", 404),
        ("GET", "/tiny/of/nothing", 404),
    ],
)
async def test_what_is_no_route_is_told_in_the_form_of_the_dialect_whose_path_it_would_be(
    gateway: Gateway, method: str, path: str, status: int
) -> None:
    answer = await gateway.http.request(method, path)
    assert (answer.status_code, answer.json().keys()) == (status, FORM), path


async def test_what_belongs_to_no_dialect_has_the_gateway_s_form(gateway: Gateway) -> None:
    elsewhere = await gateway.http.get("/tinyer", headers={"authorization": f"Bearer {SECRET}"})
    assert (elsewhere.status_code, elsewhere.json().keys()) == (404, {"error"})
    assert "x-tiny-id" not in elsewhere.headers


async def test_a_too_large_or_packed_body_and_a_crash_are_told_in_the_dialect_s_form(gateway: Gateway) -> None:
    large = await gateway.http.post(COUNTING, content=b" " * (LARGEST + 1))
    packed = await gateway.http.post(COUNTING, content=b"x", headers={"content-encoding": "br"})
    crash = await gateway.http.get(SHARED_MODEL, headers={"x-tiny": "crash"})
    for answer, status in ((large, 413), (packed, 415), (crash, 500)):
        assert (answer.status_code, answer.json().keys()) == (status, FORM)


async def test_a_request_s_id_is_in_the_dialect_s_header_and_errors(gateway: Gateway) -> None:
    for path, status in ((NAMES, 200), ("/tiny/nothing", 404)):
        answer = await gateway.http.get(path, headers={"x-request-id": "my-id"})
        assert (answer.status_code, answer.headers["x-request-id"], answer.headers["x-tiny-id"]) == (
            status,
            "my-id",
            "my-id",
        )
    assert answer.json()["id"] == "my-id"


@pytest.mark.parametrize("model", [{}, {"model": MODEL}, {"model": None}], ids=str)
async def test_a_path_s_parameter_is_a_field_of_the_body(
    gateway: Gateway, tracer: Recorder, model: dict[str, Any]
) -> None:
    answer = await gateway.http.post(f"/tiny/{MODEL}/say/", json={"text": "Hello"} | model)
    assert (answer.status_code, answer.json()) == (200, {"said": [TEXT]})
    assert [(span.name, span.attributes["url.path"]) for span in tracer.spans] == [
        (f"POST {SAY_BY_PATH}", f"/tiny/{MODEL}/say")
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        (f"/tiny/{MODEL}/say", b'{"text": "x", "model": "other"}', 400, "model"),
        (f"/tiny/{MODEL}/say", b'{"text": "x", "model": [1]}', 400, "model"),
        ("/tiny/other/say", b'{"text": "x"}', 404, "model"),
        (f"/tiny/{MODEL}/say", b"{}", 400, "text"),
        (f"/tiny/{MODEL}/say", b"[1]", 400, None),
        (f"/tiny/{MODEL}/say", b"{", 400, None),
        (COUNTING, b'{"model": "other"}', 400, "model"),
        (COUNTING, b'{"tetx": "other"}', 400, "tetx"),
        ("/tiny/count/other", b"", 404, "model"),
    ],
)
async def test_a_body_can_t_contradict_its_path(
    gateway: Gateway, path: str, body: bytes, status: int, field: str | None
) -> None:
    answer = await gateway.http.post(path, content=body)
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text


async def test_a_call_answers_without_generating(gateway: Gateway) -> None:
    counted = await gateway.http.post(COUNTING, json={"text": "four"}, params={"unit": "signs"})
    assert (counted.status_code, counted.json()) == (200, [MODEL, 4, "signs"])
    empty = await gateway.http.post(COUNTING)
    assert (empty.status_code, empty.json()) == (200, [MODEL, 0, "letters"])
    own = await gateway.http.post(COUNTING, json={"text": "quota"})
    assert (own.status_code, own.content, own.headers["content-type"]) == (202, b"no", "text/tiny; charset=utf-8")
    assert own.headers["x-tiny-quota"] == "default"
    forgotten = await gateway.http.delete(COUNTING)
    assert (forgotten.status_code, forgotten.content) == (200, b"")
    assert gateway.script.submitted == []
    metrics = (await gateway.http.get("/metrics", headers={"authorization": f"Bearer {SECRET}"})).text
    assert f'baton_dialect_requests_total{{dialect="tiny",path="{COUNT}"}} 4.0' in metrics


async def test_a_view_knows_its_request_and_may_show_a_text_or_nothing(gateway: Gateway) -> None:
    name = await gateway.http.get(f"/tiny/names/{MODEL}")
    assert (name.text, name.headers["content-type"]) == (MODEL, "text/plain; charset=utf-8")
    alive = await gateway.http.get(ALIVE, headers={"x-tiny-key": ""})  # open to all
    assert (alive.status_code, alive.content) == (200, b"")
    assert (await gateway.http.post(ALIVE, headers={"x-tiny-key": ""})).status_code == 401


async def test_a_shared_path_goes_to_the_dialect_that_recognises_the_request(gateway: Gateway) -> None:
    bearer = {"authorization": f"Bearer {SECRET}", "x-tiny-key": ""}
    tiny = await gateway.http.get(SHARED_MODEL, headers={"x-tiny": "1"})
    assert tiny.json() == {"tiny": MODEL, "asked": "1"}
    other = await gateway.http.get(SHARED_MODEL, headers=bearer)
    assert (other.json()["object"], "x-tiny-id" in other.headers) == ("model", False)
    unknown = await gateway.http.get("/v1/models/other", headers={"x-tiny": "1"})
    assert (unknown.status_code, unknown.json().keys()) == (404, FORM)
    refused = await gateway.http.get(SHARED_MODEL, headers={"x-tiny": "1"} | bearer)
    assert (refused.status_code, refused.json().keys()) == (401, FORM)


async def test_pages_may_read_the_dialect_s_headers(tokenizer: ChatTokenizer) -> None:
    settings = HttpSettings(web=WebAccess(origins=("https://page",)))
    async with run_gateway(tokenizer, settings, dialects=(*DIALECTS, TINY)) as gateway:
        answer = await gateway.http.get(NAMES, headers={"origin": "https://page"})
        assert "x-tiny-id" in answer.headers["access-control-expose-headers"].split(", ")
        other = await gateway.http.get(NAMES, headers={"origin": "https://other"})
        assert (other.status_code, other.json().keys()) == (403, FORM)


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
    assert gateway.script.submitted[0].origin.traceparent == tracer.spans[0].context


async def test_the_openapi_document_has_the_dialect_and_its_key(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json", headers={"authorization": f"Bearer {SECRET}"})).json()
    say = document["paths"][SAY]["post"]
    assert say["security"] == [{"key_tiny": []}]
    assert say["responses"]["200"]["content"].keys() == {"application/json", LINES}
    assert document["components"]["securitySchemes"]["key_tiny"]["name"] == "x-tiny-key"
    assert set(document["components"]["schemas"]["SayRequest"]["properties"]) == {"model", "text", "words", "flowing"}
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    count = document["paths"][COUNT]
    assert [each["name"] for each in count["post"]["parameters"]] == ["model"]
    body = count["delete"]["requestBody"]
    assert (body["required"], body["content"]["application/json"]["schema"]["properties"].keys()) == (False, {"text"})
    shared = document["paths"]["/v1/models/{model}"]["get"]
    assert shared["security"] == [{"key": []}, {"key_anthropic": []}, {"key_tiny": []}]
    assert len(shared["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]) == 3


def test_a_batch_s_lines_may_ask_for_what_the_dialects_say() -> None:
    generating = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", SAY]
    assert list(DialectTable((*DIALECTS, TINY)).batchable) == generating


def test_two_dialects_can_t_have_the_same_path() -> None:
    with pytest.raises(ValueError, match=f"{SAY}: claimed by both tiny and tiny"):
        DialectTable((TINY, TINY))
    other = replace(TINY, paths=DialectPaths(views={"/v1/models/{name:path}": TINY.paths.views[NAMES]}))
    with pytest.raises(ValueError, match="name the parameters the same"):
        DialectTable((*DIALECTS, other))
