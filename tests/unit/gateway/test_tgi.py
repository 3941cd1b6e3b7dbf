"""TGI's dialect: each parameter honoured or refused, whole answers, streams, errors, tokens, and what the model is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from common.errors import OverloadedError, UnavailableError, WorkerFailedError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.tenants.tenants import Tenants
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway, run_gateway

KEY = "key-of-sixteen-characters"


async def post(gateway: Gateway, path: str = "/generate", **body: Any) -> httpx.Response:
    return await gateway.http.post(path, json={"inputs": "Hello"} | body)


async def events(gateway: Gateway, path: str = "/generate_stream", **body: Any) -> list[dict[str, Any]]:
    answer = await post(gateway, path, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data:")) for line in answer.text.splitlines() if line.startswith("data:")]


async def test_a_whole_answer_and_its_details(gateway: Gateway, tokenizer: ChatTokenizer) -> None:
    assert (await post(gateway)).json() == {"generated_text": TEXT}
    told = (await post(gateway, parameters={"details": True, "top_n_tokens": 2})).json()
    details, ids = told["details"], [*tokenizer.encode(TEXT), *tokenizer.eos_ids]
    assert told["generated_text"] == TEXT
    assert {name: details[name] for name in ("finish_reason", "generated_tokens", "seed", "prefill")} == {
        "finish_reason": "eos_token", "generated_tokens": len(ids), "seed": None, "prefill": [],
    }  # fmt: skip
    assert [token["id"] for token in details["tokens"]] == ids
    assert "".join(token["text"] for token in details["tokens"] if not token["special"]) == TEXT
    assert details["tokens"][-1] == {"id": ids[-1], "text": "<|im_end|>", "logprob": -0.5, "special": True}
    assert [len(top) for top in details["top_tokens"]] == [2] * len(ids)


async def test_a_stream_is_the_same_text_token_by_token(gateway: Gateway) -> None:
    whole = (await post(gateway, parameters={"details": True})).json()
    for per_event in (1, 3, 64):
        gateway.script.per_event = per_event
        *firsts, last = told = await events(gateway, parameters={})
        assert [one["token"] for one in told] == whole["details"]["tokens"]
        assert [one["index"] for one in told] == [*range(1, len(told) + 1)]
        assert {(one["generated_text"], one["details"]) for one in firsts} == {(None, None)}
        assert last["generated_text"] == TEXT
        assert last["details"] == {
            "finish_reason": "eos_token",
            "generated_tokens": len(told),
            "input_length": len(gateway.script.submitted[-1].token_ids),
            "seed": None,
        }


async def test_the_root_answers_as_pipelines_do(gateway: Gateway) -> None:
    assert (await post(gateway, "/")).json() == [{"generated_text": f"Hello{TEXT}"}]
    assert (await post(gateway, "/", parameters={"return_full_text": False})).json() == [{"generated_text": TEXT}]
    assert (await events(gateway, "/", stream=True))[-1]["generated_text"] == f"Hello{TEXT}"
    full = await post(gateway, parameters={"return_full_text": True})
    assert full.json() == {"generated_text": f"Hello{TEXT}"}


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        (None, {"temperature": 1.0, "max_tokens": 100}),  # TGI samples if nothing is said at all
        ({}, {"temperature": 0.0, "logprobs": None, "prompt_logprobs": None}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 1.0}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"typical_p": 0.9, "top_k": 5}, {"temperature": 1.0, "typical_p": 0.9, "top_k": 5}),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.2}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        ({"max_new_tokens": 7.0}, {"max_tokens": 7}),
        ({"do_sample": True, "seed": 5}, {"seed": 5}),
        ({"details": True}, {"logprobs": 0}),
        ({"decoder_input_details": True, "top_n_tokens": 3}, {"prompt_logprobs": 0, "logprobs": 3}),
        ({"watermark": False, "adapter_id": None, "best_of": 1}, {"temperature": 0.0}),
    ],
    ids=str,
)
async def test_each_parameter_is_honoured(
    gateway: Gateway, parameters: dict[str, Any] | None, sampling: dict[str, Any]
) -> None:
    assert (await post(gateway, parameters=parameters)).status_code == 200
    (spec,) = gateway.script.submitted
    assert {name: getattr(spec.sampling, name) for name in sampling} == sampling


async def test_the_prompt_is_cut_scored_and_the_seed_told(gateway: Gateway, tokenizer: ChatTokenizer) -> None:
    fields = {"truncate": 2, "decoder_input_details": True, "do_sample": True}
    details = (await post(gateway, inputs="one two three four", parameters=fields)).json()["details"]
    ids = tokenizer.encode("one two three four")[-2:]
    assert [(token["id"], token["logprob"]) for token in details["prefill"]] == [
        (ids[0], None),
        (ids[1], -ids[1] / 1024),
    ]
    assert details["seed"] == gateway.script.submitted[-1].sampling.seed


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_stays_in_the_text(gateway: Gateway, streamed: bool) -> None:
    fields = {"stop": ["France"], "details": True}
    if streamed:
        told = await events(gateway, parameters=fields)
        texts, last = [one["token"]["text"] for one in told], told[-1]
    else:
        last = (await post(gateway, parameters=fields)).json()
        texts = [token["text"] for token in last["details"]["tokens"]]
    assert last["generated_text"] == "".join(texts) == "The capital of France"
    assert last["details"]["finish_reason"] == "stop_sequence"
    short = (await post(gateway, parameters={"max_new_tokens": 2, "details": True})).json()
    assert short["details"]["finish_reason"] == "length"


async def test_best_of_tells_the_likeliest_and_the_others(gateway: Gateway, tokenizer: ChatTokenizer) -> None:
    texts = ["red", "green", "blue"]
    gateway.script.script = lambda spec: tokenizer.encode(texts[int(spec.request_id.rpartition("-")[2])])
    likely = {token: value for text, value in (("red", -3.0), ("blue", -1.0)) for token in tokenizer.encode(text)}
    gateway.script.logprob = lambda token: likely.get(token, -2.0)
    told = (await post(gateway, parameters={"best_of": 3, "do_sample": True, "details": True})).json()
    others = [one["generated_text"] for one in told["details"]["best_of_sequences"]]
    assert [told["generated_text"], *others] == ["blue", "green", "red"]


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"type": "json", "value": '{"type": "object"}'},
        {"type": "regex", "value": "[0-9]{3}"},
        {"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}},
    ],
    ids=str,
)
async def test_grammars_are_followed(gateway: Gateway, grammar: dict[str, Any]) -> None:
    assert (await post(gateway, parameters={"grammar": grammar})).status_code == 200
    assert gateway.script.submitted[-1].grammar is not None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"inputs": ""}, "inputs"),
        ({"inputs": None}, "inputs: this field is required"),
        ({"parameters": {"watermark": True}}, "watermark: not supported"),
        ({"parameters": {"adapter_id": "mine"}}, "adapter_id: no adapters"),
        ({"parameters": {"temperature": 0}}, "parameters.temperature"),
        ({"parameters": {"top_k": 0}}, "parameters.top_k"),
        ({"parameters": {"top_p": 0}}, "parameters.top_p"),
        ({"parameters": {"typical_p": 1.5}}, "parameters.typical_p"),
        ({"parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
        ({"parameters": {"max_new_tokens": 100_000}}, "maximum context length"),
        ({"parameters": {"best_of": 2}}, "best_of: above 1 only"),
        ({"parameters": {"best_of": 2, "do_sample": True, "seed": 1}}, "seed: not together"),
        ({"parameters": {"stop": ["x"] * 17}}, "parameters.stop"),
        ({"parameters": {"truncate": 0}}, "parameters.truncate"),
        ({"parameters": {"top_n_tokens": 21}}, "parameters.top_n_tokens"),
        ({"parameters": {"grammar": {"type": "xml", "value": ""}}}, "grammar"),
        ({"parameters": {"grammar": {"type": "regex", "value": "("}}}, "grammar"),
        ({"parameters": {"top_q": 1}}, "unknown field 'parameters.top_q'"),
        ({"inputs": "word " * 400}, "inputs"),
        ({"stream": True, "parameters": {"best_of": 2, "do_sample": True}}, "best_of: not in a stream"),
        ({"stream": True, "parameters": {"decoder_input_details": True}}, "decoder_input_details: not in a stream"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_refused_by_name(gateway: Gateway, body: dict[str, Any], told: str) -> None:
    for path in ("/", "/generate"):
        answer = await post(gateway, path, **body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation"), answer.text
        assert told in answer.json()["error"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (WorkerFailedError("a worker died"), 424, "generation"),
        (OverloadedError("too many wait"), 429, "overloaded"),
        (UnavailableError("no worker"), 503, "overloaded"),
    ],
    ids=str,
)
async def test_errors_have_its_form_and_its_statuses(gateway: Gateway, error: Any, status: int, kind: str) -> None:
    gateway.script.refuse = error
    answer = await post(gateway)
    assert (answer.status_code, answer.json()) == (status, {"error": error.message, "error_type": kind})
    gateway.script.refuse, gateway.script.fail, gateway.script.fail_after = None, error, 2
    *_, last = await events(gateway)
    assert last == {"error": error.message, "error_type": kind}


async def test_other_statuses_have_its_form_as_well(gateway: Gateway) -> None:
    wrong = await gateway.http.get("/generate")
    assert (wrong.status_code, wrong.json()["error_type"]) == (405, "method_not_allowed")
    unknown = await post(gateway, model="nobody")
    assert (unknown.status_code, unknown.json()["error_type"]) == (404, "not_found")


async def test_the_root_needs_a_key_though_the_page_there_does_not(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings(tenants=Tenants(api_keys=(KEY,)))) as gateway:
        refused = await post(gateway, "/")
        assert (refused.status_code, refused.json()["error_type"]) == (401, "authentication")
        gateway.http.headers["authorization"] = f"Bearer {KEY}"
        assert (await post(gateway, "/")).status_code == 200


async def test_info_tells_of_the_first_model(gateway: Gateway) -> None:
    told = (await gateway.http.get("/info")).json()
    assert told["model_id"] == MODEL
    assert (told["max_input_tokens"], told["max_total_tokens"]) == (255, 256)


async def test_tokens_have_their_places(gateway: Gateway, prefix_space_tokenizer: ChatTokenizer) -> None:
    text = "Größe 🙂 x"
    told = (await gateway.http.post("/tokenize", json={"inputs": text, "parameters": {"do_sample": True}})).json()
    assert [token["id"] for token in told] == gateway.tokenizer.encode(text)
    assert "".join(token["text"] for token in told) == text
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in told)
    both = await gateway.http.post("/tokenize", json={"inputs": "a", "prompt": "b"})
    assert both.json()["error"]["message"].startswith("prompt: give one of prompt, messages, inputs")


async def test_a_chat_s_prompt_and_its_tokens(gateway: Gateway) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    told = (await gateway.http.post("/chat_tokenize", json=chat)).json()
    counted = (await gateway.http.post("/tokenize", json=chat)).json()
    assert [token["id"] for token in told["tokenize_response"]] == counted["tokens"]
    assert told["templated_text"] == gateway.tokenizer.decode(counted["tokens"], skip_special_tokens=False)


@pytest.fixture(autouse=True)
async def _settled(gateway: Gateway) -> AsyncIterator[None]:
    yield
    await gateway.script.until(lambda: not gateway.script.running)
