"""ollama-python by its own README, every line checked strictly by its types; calls of Open WebUI and Copilot."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
from cases import BASE_URL, GET_WEATHER, MODEL, PERSON, WEATHER, case, run
from pydantic import BaseModel

HOST = BASE_URL.removesuffix("/v1")
client = ollama.Client(host=HOST)
GREEDY = {"temperature": 0}
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
NEWER = ("id", "index", "bytes")  # Ollama's server tells them, these types don't know them yet


class Person(BaseModel):
    name: str
    age: int


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def lines(path: str, **body: Any) -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", f"{HOST}{path}", json={"model": MODEL, "options": GREEDY} | body, timeout=60) as answer:
        yield from map(json.loads, answer.iter_lines())


def known(value: Any) -> Any:
    """What is told, without what these types don't know yet."""
    if isinstance(value, dict):
        return {name: known(one) for name, one in value.items() if name not in NEWER}
    return [known(one) for one in value] if isinstance(value, list) else value


def strict(kind: type[BaseModel], value: dict[str, Any]) -> None:
    """Every field is one of the type's, and of its exact kind."""
    kind.model_validate_json(json.dumps(known(value)), strict=True, extra="forbid")


@case("chat, whole and streamed")
def chat() -> None:
    whole = client.chat(MODEL, [said("Hello!")], options=GREEDY)
    parts = list(client.chat(MODEL, [said("Hello!")], options=GREEDY, stream=True))
    assert whole.message.content
    assert whole.message.role == "assistant"
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    for end in (whole, parts[-1]):
        assert (end.done, end.done_reason) == (True, "stop")
        assert all(isinstance(end[name], int) for name in COUNTS)
        assert end.total_duration >= end.eval_duration > 0
    assert parts[-1].eval_count == whole.eval_count


@case("two turns with the message object")
def two_turns() -> None:
    messages: list[Any] = [said("My name is Anna.")]
    messages.append(client.chat(MODEL, messages, options=GREEDY).message)
    messages.append(said("What is my name?"))
    assert "Anna" in (client.chat(MODEL, messages, options=GREEDY).message.content or "")


@case("every line by the client's types, strictly")
def typed() -> None:
    for line in lines("/api/chat", messages=[said(WEATHER)], tools=[GET_WEATHER], logprobs=True, top_logprobs=2):
        strict(ollama.ChatResponse, line)
    for line in lines("/api/generate", prompt="Hello!", logprobs=True):
        strict(ollama.GenerateResponse, line)
    strict(ollama.ProcessResponse, httpx.get(f"{HOST}/api/ps").json())
    strict(ollama.ShowResponse, httpx.post(f"{HOST}/api/show", json={"model": MODEL}).json())


@case("tools, with the result in a second turn")
def tools() -> None:
    messages: list[Any] = [said(WEATHER)]
    message = client.chat(MODEL, messages, tools=[GET_WEATHER], options=GREEDY).message
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    messages += [message, {"role": "tool", "tool_name": call.function.name, "content": "sunny, 18 C"}]
    assert "sunny" in (client.chat(MODEL, messages, tools=[GET_WEATHER], options=GREEDY).message.content or "")


def get_weather(city: str) -> str:
    """Get the weather of a city

    Args:
      city: name of the city
    """
    return f"sunny in {city}"


@case("tools from a function, streamed")
def tools_streamed() -> None:
    stream = client.chat(MODEL, [said(WEATHER)], tools=[get_weather], options=GREEDY, stream=True)
    calls = [call for part in stream for call in part.message.tool_calls or ()]
    assert [get_weather(**call.function.arguments) for call in calls] == ["sunny in Paris"]


@case("format: a schema, and json")
def schema() -> None:
    answer = client.chat(MODEL, [said(PERSON)], format=Person.model_json_schema(), options=GREEDY)
    assert Person.model_validate_json(answer.message.content or "") == Person(name="Anna", age=25)
    assert isinstance(json.loads(client.generate(MODEL, PERSON, format="json", options=GREEDY).response), dict)


@case("think")
def think() -> None:
    thought = client.chat(MODEL, [said("What is 2 + 3?")], think=True, options=GREEDY).message
    plain = client.chat(MODEL, [said("What is 2 + 3?")], think=False, options=GREEDY).message
    assert thought.thinking
    assert thought.content
    assert not plain.thinking
    assert plain.content


@case("generate: whole, streamed, raw, with a context")
def generate() -> None:
    whole = client.generate(MODEL, "My name is Anna.", options=GREEDY)
    parts = list(client.generate(MODEL, "My name is Anna.", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert list(parts[-1].context or ()) == list(whole.context or ())
    second = client.generate(MODEL, "What is my name?", context=whole.context, options=GREEDY)
    assert "Anna" in second.response
    assert client.generate(MODEL, "Hello", raw=True, options=GREEDY | {"num_predict": 4}).eval_count == 4


@case("an empty prompt loads, keep_alive 0 unloads")
def load() -> None:
    assert client.generate(MODEL).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert client.chat(MODEL, [said("Hello!")], keep_alive="10m", options=GREEDY | {"num_ctx": 512}).message.content


@case("list, ps, show, pull")
def models() -> None:
    listed, *_ = client.list().models  # aliases follow
    assert listed.model
    assert listed.model.removesuffix(":latest") == MODEL
    assert listed.modified_at
    loaded, *_ = client.ps().models
    assert loaded.model == listed.model
    assert loaded.context_length
    assert loaded.expires_at
    shown = client.show(listed.model)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or ())
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == loaded.context_length
    assert client.pull(listed.model).status == "success"
    assert [one.status for one in client.pull(MODEL, stream=True)][-1] == "success"


@case("create, copy and delete by an admin's key")
def made() -> None:
    admin = ollama.Client(host=HOST, headers={"Authorization": f"Bearer {os.environ['OLLAMA_ADMIN_KEY']}"})
    made = admin.create("mario", from_=MODEL, system="You are Mario.", parameters={"temperature": 0, "num_predict": 5})
    assert made.status == "success"
    assert [one.status for one in admin.create("mario", from_="mario", stream=True)][-1] == "success"
    assert admin.copy("mario", "luigi").status == "success"
    assert 'SYSTEM "You are Mario."' in (client.show("luigi").modelfile or "")
    assert client.chat("luigi", [said("Hello!")]).eval_count == 5
    for name in ("mario", "luigi"):
        assert admin.delete(name).status == "success"
    for ask in (lambda: admin.pull("llama3.2"), lambda: admin.delete(MODEL), lambda: client.show("luigi")):
        try:
            ask()
        except ollama.ResponseError as error:
            found = error.status_code
        else:
            found = 200
        assert found in (400, 404, 409)


@case("errors have a status and words")
def errors() -> None:
    wrong = (
        (404, lambda: client.chat("no-such", [said("Hello!")])),
        (404, lambda: list(client.generate("no-such", "Hello!", stream=True))),
        (400, lambda: client.generate(MODEL, "Hello!", template="{{ .Prompt }}")),
        (400, lambda: client.embed(MODEL, "Hello!")),
        (401, lambda: client.create("mario", from_=MODEL)),
        (400, lambda: client.push(MODEL)),
    )
    for status, ask in wrong:
        try:
            ask()
        except ollama.ResponseError as error:
            found = error
        else:
            raise AssertionError(f"no error: {status}")
        assert (found.status_code, bool(found.error), "{" in found.error) == (status, True, False), found


@case("the asynchronous client")
def asynchronous() -> None:
    async def ask() -> str:
        stream = await ollama.AsyncClient(host=HOST).chat(MODEL, [said("Hello!")], options=GREEDY, stream=True)
        return "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(ask())


@case("calls of Open WebUI and Copilot")
def replayed() -> None:
    release = httpx.get(f"{HOST}/api/version").json()["version"]
    assert tuple(map(int, release.split("."))) >= (0, 6, 4)
    assert httpx.head(f"{HOST}/").status_code == 200
    body = {
        "model": f"{MODEL}:latest", "stream": True, "keep_alive": "5m", "messages": [said("Hello!")],
        "options": {"temperature": 0, "num_ctx": 2048, "num_keep": 5, "repeat_last_n": 64, "use_mmap": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{HOST}/api/chat", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        *_, last = map(json.loads, answer.iter_lines())
    assert last["done"]
    assert last["model"] == f"{MODEL}:latest"
    shown = httpx.post(f"{HOST}/api/show", json={"name": MODEL}).json()
    assert "tools" in shown["capabilities"]
    assert shown["model_info"]["general.basename"]


run()
