"""Ollama's dialect over HTTP: bodies, lines, counts, refusals, and what is told of models."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from common.errors import OverloadedError, UnavailableError, WorkerFailedError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.dialects.ollama.calls import WholeCalls
from gateway.dialects.ollama.lines import stamp
from gateway.dialects.ollama.messages import OllamaMessage, template_input
from gateway.dialects.ollama.models import RUNNING
from gateway.http.application import Greeting
from gateway.parsing.parsed import CallDelta
from gateway.tenants.tenants import Tenants
from tests.fakes.generations import ScriptedGenerations
from tests.models import TOOL_TEMPLATE, TOOL_TOKENS, build_tokenizer
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway, run_gateway

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z\Z")
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("ollama")
    build_tokenizer(folder, template=TOOL_TEMPLATE, added=[*TOOL_TOKENS, *MARKS])
    async with run_gateway(ChatTokenizer(folder), HttpSettings()) as gateway:
        yield gateway


@pytest.fixture
async def ollama(server: Gateway) -> AsyncIterator[Gateway]:
    usual = server.script.script
    vars(server.script).update(vars(ScriptedGenerations(usual)))
    server.script.max_model_len = 4096
    yield server
    server.script.script = usual


async def asked(gateway: Gateway, path: str, **fields: Any) -> Any:
    """The whole answer, or its lines."""
    body = {"model": MODEL, "messages": HELLO} if path == CHAT else {"model": MODEL, "prompt": "Hello"}
    answer = await gateway.http.post(path, json=body | fields)
    if fields.get("stream") is False or answer.headers["content-type"] == "application/json":
        return answer.json() | ({} if answer.status_code == 200 else {"status": answer.status_code})
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.split("\n")[:-1]]


def said(line: dict[str, Any]) -> str:
    return line["message"]["content"] if "message" in line else line["response"]


def answers(gateway: Gateway, text: str) -> None:
    ids = [*gateway.tokenizer.encode(text, add_special_tokens=False), *gateway.tokenizer.eos_ids[:1]]
    gateway.script.script = lambda spec: ids


def prompt(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.script.submitted[-1].token_ids, skip_special_tokens=False)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("per_event", [1, 7, 100])
async def test_a_stream_is_lines_and_the_last_one_counts(ollama: Gateway, path: str, per_event: int) -> None:
    ollama.script.per_event = per_event
    *parts, last = await asked(ollama, path)
    whole = await asked(ollama, path, stream=False)
    assert "".join(map(said, parts)) == TEXT == said(whole)
    assert all(part["done"] is False and part["model"] == MODEL and STAMP.match(part["created_at"]) for part in parts)
    for end in (last, whole):
        assert (end["done"], end["done_reason"]) == (True, "stop")
        assert all(type(end[name]) is int and end[name] >= 0 for name in COUNTS)
        assert end["prompt_eval_count"] == len(ollama.script.submitted[-1].token_ids)
        assert end["eval_count"] == len(ollama.tokenizer.encode(TEXT)) + 1
        assert end["total_duration"] >= end["eval_duration"]
    assert said(last) == ""
    assert ollama.script.running == {}


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_bound_ends_with_length_and_one_beyond_the_context_is_the_context(ollama: Gateway, path: str) -> None:
    whole = await asked(ollama, path, stream=False, options={"num_predict": 3})
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 3)
    for bound in (100_000, -1, -2, 0):
        assert said(await asked(ollama, path, stream=False, options={"num_predict": bound})) == TEXT
        spec = ollama.script.submitted[-1]
        assert spec.num_tokens == 4096


async def test_options_reach_the_generation_and_others_are_named(ollama: Gateway) -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.7, "repeat_penalty": 1.3, "seed": 11,
        "presence_penalty": -2, "frequency_penalty": 2, "num_predict": 20.0, "stop": [" is Par"],
    }  # fmt: skip
    machine = {"num_ctx": 2048, "num_gpu": 99, "repeat_last_n": 64, "mirostat": 0, "tfs_z": 1}
    body = {"model": MODEL, "messages": HELLO, "stream": False, "options": options | machine, "keep_alive": "5m"}
    answer = await ollama.http.post(CHAT, json=body)
    assert said(answer.json()) == "The capital of France"
    named = "keep_alive, options.num_ctx, options.num_gpu, options.repeat_last_n"
    assert answer.headers["x-baton-ignored-fields"] == named
    sampling = ollama.script.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
    assert (sampling.typical_p, sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (0.7, 1.3, 11, 20)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)


async def test_reasoning_comes_apart_and_think_reaches_the_template(ollama: Gateway) -> None:
    answers(ollama, "<think>\nHm.\n</think>\n\nHello!")
    *parts, _ = await asked(ollama, CHAT, think=True)
    assert "".join(part["message"].get("thinking", "") for part in parts).strip() == "Hm."
    assert "".join(map(said, parts)).strip() == "Hello!"
    whole = await asked(ollama, GENERATE, stream=False, think="high")
    assert (whole["thinking"].strip(), said(whole).strip()) == ("Hm.", "Hello!")


@pytest.mark.parametrize("per_event", [1, 100])
async def test_calls_come_whole_with_arguments_as_an_object(ollama: Gateway, per_event: int) -> None:
    ollama.script.per_event = per_event
    written = [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Oslo", "Rom")
    ]
    answers(ollama, "\n".join(written))
    *parts, last = await asked(ollama, CHAT, tools=[WEATHER])
    streamed = [call for part in parts for call in part["message"].get("tool_calls", [])]
    whole = (await asked(ollama, CHAT, stream=False, tools=[WEATHER]))["message"]["tool_calls"]
    for calls in (streamed, whole):
        assert [(call["function"]["index"], call["function"]["arguments"]) for call in calls] == [
            (0, {"city": "Oslo"}), (1, {"city": "Rom"}),
        ]  # fmt: skip
    assert last["done_reason"] == "stop"
    assert [spec.sharing.keep.call_ttl_s for spec in ollama.script.submitted] == [300.0, 300.0]
    assert ollama.script.called == [spec.request_id for spec in ollama.script.submitted]


def test_a_call_that_was_cut_is_left_out() -> None:
    calls = WholeCalls()
    assert calls.add([CallDelta(index=0, id="a", name="f", arguments='{"x"')], is_over=False) == []
    assert calls.add([CallDelta(index=0, arguments=": 1}")], is_over=False) == []
    (first,) = calls.add([CallDelta(index=1, id="b", name="g", arguments='{"y')], is_over=False)
    assert first == {"id": "a", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}}
    assert calls.add([], is_over=True) == []


async def test_results_get_the_ids_of_the_calls_that_they_answer(ollama: Gateway) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"city": "Oslo"}}}

    history = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call("f"), call("g")]},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
    ]
    _, calling, second, first = template_input([OllamaMessage(**message) for message in history])
    assert [one["id"] for one in calling["tool_calls"]] == ["call00001", "call00002"]
    assert calling["reasoning_content"] == "Hm."
    assert (second["name"], second["tool_call_id"]) == ("g", "call00002")
    assert (first["name"], first["tool_call_id"]) == ("f", "call00001")
    assert said(await asked(ollama, CHAT, stream=False, messages=history, tools=[WEATHER])) == TEXT


async def test_logprobs_come_with_their_tokens(ollama: Gateway) -> None:
    *parts, _ = await asked(ollama, GENERATE, logprobs=True, top_logprobs=2, raw=True)
    told = [entry for part in parts for entry in part["logprobs"]]
    assert b"".join(bytes(entry["bytes"]) for entry in told[:-1]).decode() == TEXT
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    whole = await asked(ollama, GENERATE, stream=False, logprobs=True)
    assert len(whole["logprobs"]) == whole["eval_count"]


async def test_format_is_followed(ollama: Gateway) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for wanted in ("json", schema):
        await asked(ollama, CHAT, format=wanted)
        assert ollama.script.submitted[-1].grammar is not None
    for nothing in ("", None):
        await asked(ollama, CHAT, format=nothing)
        assert ollama.script.submitted[-1].grammar is None


# -- prompts of generate ----------------------------------------------------------------------------------------------


async def test_a_prompt_is_a_user_s_turn_unless_it_is_raw(ollama: Gateway) -> None:
    await asked(ollama, GENERATE, system="Be brief.")
    turn = prompt(ollama)
    await asked(ollama, CHAT, messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    assert turn == prompt(ollama)
    *_, last = await asked(ollama, GENERATE, raw=True)
    assert prompt(ollama) == "Hello"
    assert "context" not in last


async def test_a_context_goes_before_the_next_turn(ollama: Gateway) -> None:
    *_, last = await asked(ollama, GENERATE)
    first = ollama.script.submitted[-1].token_ids
    assert last["context"] == [*first, *ollama.tokenizer.encode(TEXT), *ollama.tokenizer.eos_ids[:1]]
    whole = await asked(ollama, GENERATE, stream=False, context=last["context"])
    assert ollama.script.submitted[-1].token_ids == [*last["context"], *first]
    assert whole["context"][: len(last["context"])] == last["context"]


async def test_a_suffix_asks_for_what_stands_between(ollama: Gateway) -> None:
    await asked(ollama, GENERATE, prompt="def f(", suffix="return x")
    assert prompt(ollama) == f"{MARKS[0]}def f({MARKS[1]}return x{MARKS[2]}"
    marks = {ollama.tokenizer.tokenizer.token_to_id(mark) for mark in MARKS}
    assert marks <= set(ollama.script.submitted[-1].sampling.stop_token_ids)


@pytest.mark.parametrize("template", ["", TOOL_TEMPLATE])
async def test_a_model_without_a_template_gets_the_text(tokenizer: ChatTokenizer, template: str, tmp_path: Any) -> None:
    build_tokenizer(tmp_path, template=template)
    async with run_gateway(ChatTokenizer(tmp_path), HttpSettings()) as plain:
        await asked(plain, GENERATE)
        assert (prompt(plain) == "Hello") is (template == "")


# -- loading and refusing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "empty"), [(CHAT, {"messages": []}), (GENERATE, {"prompt": ""}), (GENERATE, {"prompt": None})]
)
async def test_nothing_asked_loads_or_unloads_and_does_nothing(
    ollama: Gateway, path: str, empty: dict[str, Any]
) -> None:
    for keep, reason in ((None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")):
        told = await asked(ollama, path, keep_alive=keep, **empty)
        assert (told["done"], told["done_reason"], said(told)) == (True, reason, "")
    assert ollama.script.submitted == []
    assert (await asked(ollama, path, model="other", **empty))["status"] == 404


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown field": (CHAT, {"temperature": 0.5}, "unknown field 'temperature'"),
    "unknown option": (CHAT, {"options": {"no_such": 1}}, "unknown field 'options.no_such'"),
    "mirostat": (CHAT, {"options": {"mirostat": 2}}, "mirostat: not supported"),
    "tfs_z": (CHAT, {"options": {"tfs_z": 0.5}}, "tfs_z: not supported"),
    "range": (CHAT, {"options": {"top_p": 2}}, "options.top_p"),
    "images": (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "only text is read"),
    "images of a prompt": (GENERATE, {"images": ["aGk="]}, "images: only text is read"),
    "role": (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    "template": (GENERATE, {"template": "{{ .Prompt }}"}, "template: the model's own is used"),
    "format": (GENERATE, {"format": "yaml"}, "format: must be"),
    "think": (CHAT, {"think": "a bit"}, "think"),
    "raw and system": (GENERATE, {"raw": True, "system": "x"}, "system: raw takes"),
    "raw and context": (GENERATE, {"raw": True, "context": [1]}, "context: not allowed"),
    "context outside": (GENERATE, {"context": [2**31]}, "a token id is not below"),
    "top_logprobs": (CHAT, {"top_logprobs": 2}, "top_logprobs: only allowed"),
    "too long": (GENERATE, {"prompt": "x" * 50_000}, "prompt"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_what_can_t_be_honoured_is_refused_by_name(ollama: Gateway, case: str) -> None:
    path, fields, words = WRONG[case]
    told = await asked(ollama, path, **fields)
    assert told.keys() == {"error", "status"}
    assert (told["status"], words in told["error"]) == (400, True), told
    assert ollama.script.submitted == []


async def test_errors_have_one_form_and_the_last_line_of_a_broken_stream_is_one(ollama: Gateway) -> None:
    ollama.script.fail, ollama.script.fail_after = WorkerFailedError("broke"), 2
    *_, last = await asked(ollama, CHAT)
    assert last == {"error": "broke"}
    assert await asked(ollama, CHAT, stream=False) == {"error": "broke", "status": 500}
    ollama.script.refuse = OverloadedError("full", retry_after_s=7)
    answer = await ollama.http.post(CHAT, json={"model": MODEL, "messages": HELLO})
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, {"error": "full"}, "7")
    ollama.script.refuse = UnavailableError("nobody")
    assert (await asked(ollama, GENERATE))["status"] == 503
    unknown = await asked(ollama, CHAT, model="other")
    assert (unknown["status"], unknown["error"].startswith("model not found: ")) == (404, True)
    for method, path, status in (
        ("GET", CHAT, 405),
        ("POST", "/api/nothing", 404),
        ("POST", "/api/blobs/sha256:0", 404),
    ):
        told = await ollama.http.request(method, path)
        assert (told.status_code, told.json().keys()) == (status, {"error"})


async def test_a_key_is_a_bearer_s(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings(tenants=Tenants(api_keys=["secret"]))) as guarded:
        for path in ("/api/tags", "/api/version", "/api/ps"):
            refused = await guarded.http.get(path)
            assert (refused.status_code, refused.json().keys()) == (401, {"error"})
        named = await guarded.http.get("/api/tags", headers={"authorization": "Bearer secret"})
        assert named.status_code == 200


# -- models -----------------------------------------------------------------------------------------------------------


async def test_models_are_listed_with_and_asked_by_either_name(ollama: Gateway) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = (await ollama.http.get(path)).json()["models"]
        assert model["name"] == model["model"] == f"{MODEL}:latest"
        assert re.fullmatch("[0-9a-f]{64}", model["digest"])
        assert model["details"].keys() == {
            "parent_model", "format", "family", "families", "parameter_size", "quantization_level",
        }  # fmt: skip
    assert (model["context_length"], model["expires_at"]) == (4096, "2300-01-01T00:00:00Z")
    whole = await asked(ollama, CHAT, stream=False, model=f"{MODEL}:latest")
    assert (whole["model"], said(whole)) == (f"{MODEL}:latest", TEXT)
    assert ollama.script.submitted[-1].model == MODEL


async def test_show_tells_what_clients_choose_by(ollama: Gateway) -> None:
    for name in ({"model": MODEL}, {"name": f"{MODEL}:latest", "verbose": True}):
        shown = (await ollama.http.post("/api/show", json=name)).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == 4096
        assert shown["template"] == TOOL_TEMPLATE
        assert shown.keys() >= {"modelfile", "parameters", "details", "modified_at"}
    assert (await ollama.http.post("/api/show", json={"model": "other"})).status_code == 404
    release = (await ollama.http.get("/api/version")).json()["version"]
    assert tuple(map(int, release.split("."))) >= (0, 6, 4)


async def test_a_served_model_is_pulled_already_and_other_verbs_need_an_admin_or_are_refused(ollama: Gateway) -> None:
    streamed = await ollama.http.post("/api/pull", json={"model": MODEL})
    assert (streamed.headers["content-type"], streamed.text) == ("application/x-ndjson", '{"status":"success"}\n')
    whole = await ollama.http.post("/api/pull", json={"name": MODEL, "stream": False, "insecure": False})
    assert whole.json() == {"status": "success"}
    cases = [
        ("POST", "/api/pull", {"model": "other"}, 401),
        ("DELETE", "/api/delete", {"model": MODEL}, 401),
        ("POST", "/api/copy", {"source": MODEL, "destination": "x"}, 401),
        ("POST", "/api/create", {"model": "mario", "from": MODEL, "system": "x"}, 401),
        ("POST", "/api/push", {"model": MODEL}, 400),
        ("POST", "/api/embed", {"model": MODEL, "input": "x"}, 400),
        ("POST", "/api/embeddings", {"model": MODEL, "prompt": "x"}, 400),
    ]
    for method, path, body, status in cases:
        refused = await ollama.http.request(method, path, json=body)
        assert (refused.status_code, refused.json().keys()) == (status, {"error"}), path


async def test_only_the_port_of_ollama_s_clients_says_that_it_runs() -> None:
    async def page(scope: Any, receive: Any, send: Any) -> None:
        await Response("the console")(scope, receive, send)

    greeting = Greeting(page, port=11434, text=RUNNING)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(greeting)) as client:
        told = {url: (await client.get(f"http://x{url}")).text for url in (":11434/", ":11434/api/tags", ":8000/")}
        assert (await client.head("http://x:11434/")).status_code == 200
    assert told == {":11434/": "Ollama is running", ":11434/api/tags": "the console", ":8000/": "the console"}


def test_instants_have_nanoseconds() -> None:
    assert stamp(1_700_000_000_000_000_042) == "2023-11-14T22:13:20.000000042Z"
