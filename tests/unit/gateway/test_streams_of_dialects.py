"""Every dialect's stream says what its whole answer says, however the tokens come and wherever they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic_core import from_json

from common.messages import SamplingParams
from common.words import Finish
from gateway.answers.answer import Answer
from gateway.answers.choice import Choice
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects import DIALECTS
from gateway.dialects.table import DialectTable, Entry
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.routes.serving import StreamedAnswer
from tests.unit.gateway.delivered import Generation, Socket, cut, put, turn_over

TEXT = "<think>Größe 🙂 or\u2028not?</think>Let me <see> the 🙂 sea."
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"🙂\\"", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
SIZES = ([1], [2], [3], [7], [1, 5, 2], [1000])
ENTRIES = DialectTable(DIALECTS).entries
Json = dict[str, Any]


@dataclass
class Said:
    """What an answer says, in no dialect's words."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names and arguments
    end: str | None = None

    @property
    def comparable(self) -> tuple[Any, ...]:
        """Arguments as clients read them, also those that were cut off."""
        calls = [(name, _arguments(text)) for name, text in self.calls]
        return self.text, self.reasoning, calls, self.end

    def go_on(self, index: int, name: str, arguments: str) -> None:
        """A piece of a call; the first one has its name."""
        if index == len(self.calls):
            self.calls.append((name, ""))
            assert name
        assert index == len(self.calls) - 1
        known, before = self.calls[index]
        self.calls[index] = known, before + arguments


def _arguments(text: str) -> Any:
    try:
        return from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return text


@dataclass(frozen=True)
class Way:
    """How a dialect is asked, and its answers read: events in order, and whole ones. Either raises AssertionError."""

    body: Json
    streamed: Callable[[list[Json]], Said]
    whole: Callable[[Any], Said]


# -- readers -------------------------------------------------------------------------------------------------------------


def chunks_of_openai(events: list[Json]) -> Said:
    said = Said()
    for number, event in enumerate(events):
        (entry,) = event["choices"]
        delta = entry.get("delta") or {"content": entry.get("text")}
        assert ("role" in delta) == (number == 0 and "delta" in entry)
        assert (entry["finish_reason"] is not None) == (number == len(events) - 1)
        said.text += delta.get("content") or ""
        said.reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", []):
            assert ("id" in call) == ("name" in call["function"])
            said.go_on(call["index"], call["function"].get("name", ""), call["function"]["arguments"])
        said.end = entry["finish_reason"]
    return said


def object_of_openai(whole: Json) -> Said:
    (choice,) = whole["choices"]
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return Said(message["content"] or "", message.get("reasoning") or "", calls, choice["finish_reason"])


def events_of_responses(events: list[Json]) -> Said:
    """Each item begins, grows and ends before the next; the last event repeats all of them."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[Json] = []
    grown, is_open = "", False
    for event in events[2:-1]:
        kind, verb = event["type"].rpartition(".")[0], event["type"].rpartition(".")[2]
        if event["type"] == "response.output_item.added":
            assert not is_open
            assert event["output_index"] == len(items)
            items.append(event["item"])
            grown, is_open = "", True
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1], is_open = event["item"], False
        elif verb == "delta":
            assert is_open
            assert event["item_id"] == items[-1]["id"]
            grown += event["delta"]
        elif kind in ("response.output_text", "response.reasoning_text", "response.function_call_arguments"):
            assert event.get("text", event.get("arguments")) == grown
    assert not is_open
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    return object_of_responses(last)


def object_of_responses(whole: Json) -> Said:
    said = Said(end=whole["status"])
    for item in whole["output"]:
        if item["type"] == "function_call":
            said.calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            said.reasoning += "".join(part["text"] for part in item["content"])
        else:
            said.text += "".join(part["text"] for part in item["content"])
    return said


def events_of_messages(events: list[Json]) -> Said:
    """Each block begins, grows and ends before the next."""
    events = [event for event in events if event["type"] != "ping"]
    first, *between, last, stopped = events
    assert [first["type"], last["type"], stopped["type"]] == ["message_start", "message_delta", "message_stop"]
    assert first["message"]["content"] == []
    blocks: list[Json] = []
    is_open = False
    for event in between:
        kind = event["type"].removeprefix("content_block_")
        assert event["index"] == len(blocks) - (kind != "start")
        assert is_open is (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(event["content_block"] | {"json": ""})
        elif kind == "delta":
            _grow(blocks[-1], event["delta"])
    assert not is_open
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _arguments(block["json"])
    return object_of_messages({"content": blocks, **last["delta"]})


def _grow(block: Json, delta: Json) -> None:
    """Raises KeyError for a delta of another kind of block."""
    match delta["type"]:
        case "input_json_delta":
            assert block["input"] == {}
            block["json"] += delta["partial_json"]
        case "signature_delta":
            assert (block["type"], block["signature"]) == ("thinking", "")
            block["signature"] = delta["signature"]
        case kind:
            block[kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]


def object_of_messages(whole: Json) -> Said:
    said = Said(end=whole["stop_reason"])
    for block in whole["content"]:
        if block["type"] == "tool_use":
            said.calls.append((block["name"], json.dumps(block["input"])))
        elif block["type"] == "thinking":
            assert block["signature"]
            said.reasoning += block["thinking"]
        else:
            said.text += block["text"]
    return said


def lines_of_ollama(events: list[Json]) -> Said:
    said = Said()
    for number, event in enumerate(events):
        assert event["done"] == (number == len(events) - 1)
        said = _joined(said, object_of_ollama(event))
    return said


def object_of_ollama(whole: Json) -> Said:
    message = whole.get("message") or {"content": whole["response"], "thinking": whole.get("thinking")}
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    return Said(message["content"], message.get("thinking") or "", calls, whole.get("done_reason"))


def chunks_of_llama_cpp(events: list[Json]) -> Said:
    """The last one has no text of its own."""
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["content"] == ""
    return Said("".join(event["content"] for event in events), end=events[-1]["stop_type"])


def object_of_llama_cpp(whole: Json) -> Said:
    return Said(whole["content"], end=whole["stop_type"])


def events_of_triton(events: list[Json]) -> Said:
    return Said("".join(event["text_output"] for event in events))


def object_of_triton(whole: Json) -> Said:
    return Said(whole["text_output"].removeprefix("?"))


def tokens_of_tgi(events: list[Json]) -> Said:
    """An event a token; the last one has the whole text, which the others' texts make up."""
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["generated_text"] is not None for event in events] == [False] * (len(events) - 1) + [True]
    whole = str(events[-1]["generated_text"])
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == whole.removeprefix(
        "?"
    )
    return Said(whole, end=events[-1]["details"]["finish_reason"])


def object_of_tgi(whole: Any) -> Said:
    told = whole[0] if isinstance(whole, list) else whole
    return Said(told["generated_text"], end=told["details"]["finish_reason"])


def _joined(one: Said, other: Said) -> Said:
    return Said(one.text + other.text, one.reasoning + other.reasoning, one.calls + other.calls, other.end)


# -- what is asked ---------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "?"}]
PARAMETERS = {"type": "object", "properties": {}}
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in ("get_weather", "get_time")]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
_OPENAI = Way({"model": "m", "messages": MESSAGES, "tools": TOOLS}, chunks_of_openai, object_of_openai)
_TGI = Way({"inputs": "?", "parameters": {"details": True}}, tokens_of_tgi, object_of_tgi)
WAYS = {
    "/v1/chat/completions": _OPENAI,
    "/v1/completions": Way({"model": "m", "prompt": "?"}, chunks_of_openai, object_of_openai),
    "/v1/responses": Way(
        {"model": "m", "input": "?", "tools": [{"type": "function"} | function for function in FUNCTIONS]},
        events_of_responses,
        object_of_responses,
    ),
    "/v1/messages": Way(
        {
            "model": "m",
            "messages": MESSAGES,
            "max_tokens": 1000,
            "thinking": {"type": "adaptive"},
            "tools": [{"name": one["name"], "input_schema": PARAMETERS} for one in FUNCTIONS],
        },
        events_of_messages,
        object_of_messages,
    ),
    "/api/chat": Way({"model": "m", "messages": MESSAGES, "tools": TOOLS}, lines_of_ollama, object_of_ollama),
    "/api/generate": Way({"model": "m", "prompt": "?"}, lines_of_ollama, object_of_ollama),
    "/completion": Way({"prompt": "?"}, chunks_of_llama_cpp, object_of_llama_cpp),
    "/v2/models/{model}/generate_stream": Way({"model": "m", "text_input": "?"}, events_of_triton, object_of_triton),
    "/generate_stream": _TGI,
    "/": _TGI,
}
WITHOUT_STREAM = {"/v1/responses/compact", "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"}
OF_OTHERS = {"/invocations"}  # each body is answered as at its own path
BY_PATH = {entry.path: entry for entry in ENTRIES.values()}


def test_every_way_to_generate_is_tried() -> None:
    tried = {type(BY_PATH[path].endpoint) for path in WAYS}
    untried = {entry.path for entry in BY_PATH.values() if type(entry.endpoint) not in tried}
    assert untried == WITHOUT_STREAM | OF_OTHERS


# -- the answer --------------------------------------------------------------------------------------------------------------


class Making:
    """One answer of an endpoint, from tokens that a test puts."""

    def __init__(self, entry: Entry, way: Way, tokenizer: ChatTokenizer, *, stream: bool) -> None:
        self._entry = entry
        self.body, ask = entry.read(json.dumps(way.body | {"stream": stream}).encode())
        self._generation = Generation()
        sampling = SamplingParams(
            max_tokens=1000, stop_token_ids=tokenizer.eos_ids, logprobs=ask.sampling.params.logprobs
        )
        self.scored = sampling.logprobs is not None
        choice = Choice(
            self._generation, tokenizer, index=0, rules=ask.text, sampling=sampling, reply=ask.reply, prompt=[5]
        )
        self.answer = Answer(
            id="a_b", model="m", own_model="m", tokenizer=tokenizer, choices=[choice], prompts=[[5]], created=7
        )

    def put(self, ids: list[int], sizes: list[int], finish: Finish) -> None:
        for event in cut(ids, sizes, finish=finish, logprobs=self.scored):
            put(self._generation.mailbox, event)

    async def streamed(self, ids: list[int], sizes: list[int], finish: Finish) -> list[Json]:
        """The events' data, of tokens that come one event a turn."""
        metrics = AnswerMetrics(_METRICS, self.answer, 0.0)
        stream, socket = (
            StreamedAnswer(self._entry.endpoint.events(self.body, self.answer), self.answer, metrics),
            Socket(),
        )
        stream.begin(socket)
        for event in cut(ids, sizes, finish=finish, logprobs=self.scored):
            put(self._generation.mailbox, event)
            await turn_over()
        while not socket.is_ended:
            await turn_over()
        lines = b"".join(socket.parts).decode().split("\n")
        told = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event: ")]
        return [json.loads(line) for line in told if line != "[DONE]"]

    async def whole(self, ids: list[int], finish: Finish) -> Any:
        self.put(ids, [1000], finish)
        return await self._entry.endpoint.whole(self.body, self.answer)


_METRICS = GatewayMetrics(["m"])


def ids_of(tokenizer: ChatTokenizer) -> list[int]:
    return tokenizer.encode(TEXT + CALLS, add_special_tokens=False)


async def both(
    path: str, tokenizer: ChatTokenizer, ids: list[int], sizes: list[int], finish: Finish
) -> tuple[Said, Said]:
    """What the stream says, and what the whole answer does."""
    entry, way = BY_PATH[path], WAYS[path]
    whole_entry = BY_PATH[path.removesuffix("_stream")]  # some paths do nothing else
    events = await Making(entry, way, tokenizer, stream=True).streamed(ids, sizes, finish)
    whole = await Making(whole_entry, way, tokenizer, stream=False).whole(ids, finish)
    return way.streamed(events), way.whole(whole)


@pytest.mark.parametrize("path", WAYS)
async def test_a_stream_says_what_the_whole_answer_says_however_its_tokens_come(demo: ChatTokenizer, path: str) -> None:
    ids = [*ids_of(demo), demo.eos_ids[0]]
    cuts = [*SIZES, *([at, 1000] for at in range(1, len(ids)))]
    for sizes in cuts:
        streamed, whole = await both(path, demo, ids, sizes, Finish.STOP)
        assert streamed.comparable == whole.comparable, sizes
    if whole.calls:
        assert whole.comparable[:3] == (
            "Let me <see> the 🙂 sea.",
            "Größe 🙂 or\u2028not?",
            [("get_weather", {"city": 'Zürich "🙂"', "days": 3}), ("get_time", {})],
        )
    else:
        assert "Let me <see> the 🙂 sea." in whole.text


@pytest.mark.parametrize("path", WAYS)
async def test_a_stream_says_what_the_whole_answer_says_wherever_its_tokens_end(demo: ChatTokenizer, path: str) -> None:
    ids = ids_of(demo)
    for end in range(1, len(ids)):
        streamed, whole = await both(path, demo, ids[:end], [2 if end % 2 else 1000], Finish.LENGTH)
        assert streamed.comparable == whole.comparable, end
