"""llama.cpp's own dialect over HTTP: prompts of every form, chunks and whole objects, refusals, what is told of the server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import UnavailableError, WorkerFailedError
from gateway.answers.ask import Joined, Text, TokenIds
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.dialects.llamacpp.bodies import BANNED
from gateway.dialects.llamacpp.prompts import prompts_of
from tests.fakes.generations import ScriptedGenerations
from tests.models import TOOL_TEMPLATE, TOOL_TOKENS, build_tokenizer
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway, run_gateway

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
COMPLETION, INFILL = "/completion", "/infill"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("llama-cpp")
    build_tokenizer(folder, template=TOOL_TEMPLATE, added=[*TOOL_TOKENS, *MARKS])
    async with run_gateway(ChatTokenizer(folder), HttpSettings()) as gateway:
        yield gateway


@pytest.fixture
async def llama(server: Gateway) -> AsyncIterator[Gateway]:
    usual = server.script.script
    vars(server.script).update(vars(ScriptedGenerations(usual)))
    server.script.max_model_len = 4096
    yield server
    server.script.script = usual


async def asked(gateway: Gateway, path: str = COMPLETION, **fields: Any) -> Any:
    """The whole answer, or a stream's chunks."""
    body = {"prompt": "Hello"} if path == COMPLETION else {"input_prefix": "def f("}
    answer = await gateway.http.post(path, json=body | fields)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def prompt(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.script.submitted[-1].token_ids, skip_special_tokens=False)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_event", [1, 7])
@pytest.mark.parametrize("more", [{}, {"return_tokens": True}, {"n_probs": 2}, {"timings_per_token": True}], ids=str)
async def test_a_stream_is_chunks_and_its_last_one_tells_all(
    llama: Gateway, per_event: int, more: dict[str, Any]
) -> None:
    llama.script.per_event, llama.script.cached_tokens = per_event, 1
    *parts, last = await asked(llama, stream=True, **more)
    whole = await asked(llama, **more)
    ids = llama.tokenizer.encode(TEXT)
    assert "".join(part["content"] for part in parts) == TEXT == whole["content"]
    assert not any(part["stop"] for part in parts)
    for end in (last, whole):
        assert (end["stop"], end["stop_type"], end["stopping_word"], end["model"]) == (True, "eos", "", MODEL)
        assert (end["tokens_predicted"], end["tokens_evaluated"], end["tokens_cached"]) == (len(ids) + 1, 3, 1)
        assert (end["prompt"], end["truncated"], end["has_new_line"]) == ("Hello", False, False)
        assert (end["timings"]["cache_n"], end["timings"]["prompt_n"]) == (1, 2)
        assert end["timings"]["predicted_n"] == len(ids) + 1
    assert [part["tokens_predicted"] for part in parts][:2] == [per_event, min(2 * per_event, len(ids) + 1)][
        : len(parts)
    ]
    if "return_tokens" in more:
        assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
        assert whole["tokens"][:-1] == ids
    if "n_probs" in more:
        told = [entry for part in parts for entry in part["completion_probabilities"]]
        assert told == whole["completion_probabilities"]
        assert [entry["id"] for entry in told[:-1]] == ids
        assert b"".join(bytes(entry["bytes"]) for entry in told[:-1]).decode() == TEXT
        assert {len(entry["top_logprobs"]) for entry in told} == {2}
    if "timings_per_token" in more:
        assert all(part["timings"]["predicted_n"] == part["tokens_predicted"] for part in parts)
    assert llama.script.running == {}


async def test_what_ended_it_is_told(llama: Gateway) -> None:
    cut = await asked(llama, n_predict=3)
    assert (cut["stop_type"], cut["tokens_predicted"]) == ("limit", 3)
    found = await asked(llama, stop=["no such", " is Par"])
    assert (found["stop_type"], found["stopping_word"], found["content"]) == (
        "word",
        " is Par",
        "The capital of France",
    )
    none = await asked(llama, n_predict=0)
    assert (none["stop_type"], none["content"], none["tokens_predicted"]) == ("limit", "", 0)
    for open_ended in (-1, -2, 100_000):
        await asked(llama, n_predict=open_ended)
        assert llama.script.submitted[-1].num_tokens == 4096


async def test_a_new_line_in_any_chunk_is_told(llama: Gateway) -> None:
    ids = [*llama.tokenizer.encode("One.\nTwo.", add_special_tokens=False), *llama.tokenizer.eos_ids[:1]]
    llama.script.script = lambda spec: ids
    *_, last = await asked(llama, stream=True)
    assert (last["has_new_line"], (await asked(llama))["has_new_line"]) == (True, True)


async def test_several_prompts_and_choices_are_a_list(llama: Gateway) -> None:
    several = await asked(llama, prompt=["Hello", "You", [5, 6]], n_cmpl=2)
    assert [one["index"] for one in several] == [0, 1, 2, 3, 4, 5]
    assert [one["prompt"] for one in several][1:4] == ["Hello", "You", "You"]
    assert [one["tokens_evaluated"] for one in several][-1] == 2
    chunks = await asked(llama, prompt=["Hello", "You"], stream=True)
    assert {chunk["index"] for chunk in chunks if chunk["stop"]} == {0, 1}


async def test_fields_may_be_chosen(llama: Gateway) -> None:
    told = await asked(
        llama, response_fields=["content", "timings/predicted_n", "generation_settings/n_predict", "no/such"]
    )
    assert told == {"content": TEXT, "predicted_n": len(llama.tokenizer.encode(TEXT)) + 1, "n_predict": -1}


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_each_form_of_prompts() -> None:
    cases: list[tuple[Any, Any]] = [
        ("a", [Text("a")]),
        ([1, 2], [TokenIds([1, 2])]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([[1, 2], "b"], [TokenIds([1, 2]), Text("b")]),
        ([1, "a", 2, 3], [Joined([TokenIds([1]), Text("a", adds_special=False), TokenIds([2, 3])])]),
        (["a", 1, "b"], [Joined([Text("a"), TokenIds([1]), Text("b", adds_special=False)])]),
        ({"prompt_string": "a", "multimodal_data": []}, [Text("a")]),
        ([{"prompt_string": "a"}, [1, "b"]], [Text("a"), Joined([TokenIds([1]), Text("b", adds_special=False)])]),
    ]
    for given, found in cases:
        assert prompts_of(given) == found, given
    for wrong in (1, None, True, [], [[]], [1.5], [-1], [2**32], {"prompt": "a"}, [None], [1, None], ["a"] * 65):
        with pytest.raises(ValueError, match=r"must be|id is|at most"):
            prompts_of(wrong)
    with pytest.raises(ValueError, match="only text"):
        prompts_of({"prompt_string": "a", "multimodal_data": ["aGk="]})


async def test_a_mixed_prompt_is_joined(llama: Gateway) -> None:
    hello = llama.tokenizer.encode("Hello", add_special_tokens=False)
    await asked(llama, prompt=[7, "Hello", 8])
    assert llama.script.submitted[-1].token_ids == [7, *hello, 8]


async def test_infill_has_the_files_around_and_the_text_begun(llama: Gateway) -> None:
    before, after, middle, repository, file = MARKS
    fields = {"input_suffix": "return x", "prompt": "x", "input_extra": [{"filename": "a.py", "text": "y"}]}
    told = await asked(llama, INFILL, **fields)
    assert prompt(llama) == f"{repository}project\n{file}a.py\ny\n{file}current\n{before}def f({after}return x{middle}x"
    assert told["content"] == TEXT
    *_, last = await asked(llama, INFILL, stream=True)
    assert last["stop"]
    marks = {llama.tokenizer.tokenizer.token_to_id(mark) for mark in MARKS}
    assert marks <= set(llama.script.submitted[-1].sampling.stop_token_ids)


async def test_a_model_without_marks_refuses_infill(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings()) as plain:
        error = (await asked(plain, INFILL))["error"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("input_suffix: this model has no tokens")


# -- fields -----------------------------------------------------------------------------------------------------------


async def test_every_field_reaches_the_generation_and_settings_say_so(llama: Gateway) -> None:
    chosen = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.7, "repeat_penalty": 1.3, "seed": 11,
        "presence_penalty": -2, "frequency_penalty": 2, "n_predict": 20,
    }  # fmt: skip
    ignored = {"cache_prompt": True, "repeat_last_n": 64, "samplers": ["top_k"], "dry_multiplier": 0}
    biases = [[40, -1.5], [41, False], ["42", 2]]
    body = {"prompt": "Hello", "logit_bias": biases, "model": MODEL} | chosen | ignored
    answer = await llama.http.post("/completions", json=body)
    assert answer.headers["x-baton-ignored-fields"] == "cache_prompt, repeat_last_n, samplers"
    settings = answer.json()["generation_settings"]
    assert {name: settings[name] for name in chosen} == chosen
    sampling = llama.script.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
    assert (sampling.typical_p, sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (0.7, 1.3, 11, 20)
    assert sampling.logit_bias == {40: -1.5, 41: BANNED, 42: 2}
    for grammar in ({"grammar": 'root ::= "a" | "b"'}, {"json_schema": {"type": "object"}}):
        await asked(llama, **grammar)
        assert llama.script.submitted[-1].grammar is not None
    await asked(llama, grammar="", ignore_eos=True)
    assert llama.script.submitted[-1].grammar is None
    assert llama.script.submitted[-1].sampling.stop_token_ids == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"no_such": 1}, "unknown field 'no_such'"),
    "dry": ({"dry_multiplier": 0.8}, "dry_multiplier: not supported"),
    "xtc": ({"xtc_probability": 0.5}, "xtc_probability: not supported"),
    "mirostat": ({"mirostat": 2}, "mirostat: not supported"),
    "dynatemp": ({"dynatemp_range": 0.5}, "dynatemp_range: not supported"),
    "post sampling": ({"post_sampling_probs": True}, "post_sampling_probs: probabilities"),
    "lora": ({"lora": [{"id": 0, "scale": 1}]}, "lora: no adapters"),
    "clock": ({"t_max_predict_ms": 100}, "t_max_predict_ms"),
    "n_probs": ({"n_probs": 21}, "n_probs"),
    "bias by text": ({"logit_bias": [["Hello", 1]]}, "named by their ids"),
    "bias": ({"logit_bias": [[1]]}, "a bias is a pair"),
    "both": ({"grammar": "root ::= [a]", "json_schema": {}}, "json_schema: an answer can't follow grammar"),
    "a grammar": ({"grammar": "root ::= ("}, "grammar: "),
    "a prompt": ({"prompt": {"text": "a"}}, "prompt: must be a text"),
    "several": ({"prompt": ["a"] * 40, "n_cmpl": 2}, "at most 64 prompts"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_what_can_t_be_honoured_is_refused_by_name(llama: Gateway, case: str) -> None:
    fields, words = WRONG[case]
    error = (await asked(llama, stream=True, **fields))["error"]
    assert error.keys() == {"code", "message", "type", "param"}
    assert (error["code"], error["type"], words in error["message"]) == (400, "invalid_request_error", True), error
    assert llama.script.submitted == []


async def test_errors_have_llama_cpp_s_form(llama: Gateway) -> None:
    long = await asked(llama, prompt="x " * 9_000)
    assert (long["error"]["code"], long["error"]["type"]) == (400, "exceed_context_size_error")
    assert (await asked(llama, model="other"))["error"]["type"] == "not_found_error"
    llama.script.fail, llama.script.fail_after = WorkerFailedError("broke"), 2
    *_, last = await asked(llama, stream=True)
    assert last["error"] == {"code": 500, "message": "broke", "type": "server_error", "param": None}
    llama.script.refuse = UnavailableError("nobody")
    assert (await asked(llama))["error"]["type"] == "unavailable_error"
    refused = await llama.http.get(COMPLETION)
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, 405)


# -- the server -------------------------------------------------------------------------------------------------------


async def test_properties_slots_and_templates(llama: Gateway) -> None:
    props = (await llama.http.get("/props")).json()
    assert (props["model_alias"], props["chat_template"], props["total_slots"]) == (MODEL, TOOL_TEMPLATE, 1)
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert (await llama.http.get("/props?model=other")).status_code == 404
    made = (await llama.http.post("/apply-template", json={"messages": HELLO})).json()["prompt"]
    await llama.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert made == prompt(llama)
    open_ended = {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}], "continue_final_message": True}
    assert (await llama.http.post("/apply-template", json=open_ended)).json()["prompt"].endswith("Hi")


async def test_slots_are_the_places_of_decode_workers(llama: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = llama.script.worker("decode")
    busy = type(worker)(
        **{name: getattr(worker, name) for name in worker.__struct_fields__} | {"max_sequences": 3, "running": 2}
    )
    monkeypatch.setattr(ScriptedGenerations, "workers", [busy, llama.script.worker("prefill")])
    assert (await llama.http.get("/props")).json()["total_slots"] == 3
    told = (await llama.http.get("/slots?fail_on_no_slot=1")).json()
    assert [slot["is_processing"] for slot in told] == [True, True, False]
    monkeypatch.setattr(
        ScriptedGenerations,
        "workers",
        [type(worker)(**{name: getattr(busy, name) for name in worker.__struct_fields__} | {"running": 3})],
    )
    full = await llama.http.get("/slots?fail_on_no_slot=1")
    assert (full.status_code, full.json()["error"]["type"]) == (503, "unavailable_error")


async def test_tokens_and_texts_in_either_form(llama: Gateway) -> None:
    ids = llama.tokenizer.encode("Größe 🙂", add_special_tokens=False)
    assert (await llama.http.post("/tokenize", json={"content": "Größe 🙂"})).json()["tokens"] == ids
    pieces = (await llama.http.post("/tokenize", json={"content": "Größe 🙂", "with_pieces": True})).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    raw = [piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces]
    assert b"".join(raw).decode() == "Größe 🙂"
    think = llama.tokenizer.tokenizer.token_to_id("<think>")
    assert (await llama.http.post("/tokenize", json={"content": "<think>"})).json()["tokens"] == [think]
    plain = await llama.http.post("/tokenize", json={"content": "<think>", "parse_special": False})
    assert think not in plain.json()["tokens"]
    assert (await llama.http.post("/detokenize", json={"tokens": ids})).json()["content"] == "Größe 🙂"
    both = await llama.http.post("/tokenize", json={"content": "a", "prompt": "a"})
    assert "give one of" in both.json()["error"]["message"]
