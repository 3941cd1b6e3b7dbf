"""The OpenAPI document can be read by generators of clients: names, typed answers, no enumeration of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.batches.routes import BatchRoutes
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, Gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(tokenizer: ChatTokenizer) -> dict[str, Any]:
    script = ScriptedGenerations(lambda spec: [])
    app = create_app(
        generations=script,
        catalogue=script.catalogue(tokenizer),
        settings=HttpSettings(),
        batches=lambda answers, table, metrics, pooled: BatchRoutes(None, list(table.batchable)),  # type: ignore[arg-type]
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", verify=False
    ) as client:
        return dict((await client.get("/openapi.json")).json())


def within(part: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document."""
    if isinstance(part, dict):
        yield part
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from within(each)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


async def test_every_operation_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert {"post_v1_chat_completions", "get_v1_models_model", "delete_v1_files_file_id"} <= set(names)


async def test_every_json_answer_of_clients_paths_has_a_schema(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        for status, answer in operation["responses"].items():
            if path.startswith("/v1/") or status != "200":
                content = answer.get("content", {})
                assert "schema" in content.get("application/json", {"schema": 1}), (method, path, status)


async def test_enumerations_and_lists_are_of_one_kind(document: dict[str, Any]) -> None:
    for part in within(document):
        if isinstance(part.get("enum"), list):
            assert len({type(value) for value in part["enum"]}) == 1, part
        if part.get("type") == "array":
            assert "items" in part, part


async def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    wanted = {part["$ref"].removeprefix("#/components/schemas/") for part in within(document) if "$ref" in part}
    assert {"Off", "ChatMessage", "ChatRequest"} <= wanted
    assert wanted <= set(schemas)
    assert {"message", "logprobs"} <= set(schemas["ChatChoice"]["properties"])
    assert {"role", "content"} <= set(schemas["ChatDelta"]["properties"])


@pytest.mark.parametrize("value", [None, False, [], {}])
async def test_what_is_off_may_be_said(document: dict[str, Any], value: Any) -> None:
    Draft202012Validator(document["components"]["schemas"]["Off"]).validate(value)
    assert not Draft202012Validator(document["components"]["schemas"]["Off"]).is_valid([value])


async def test_answers_are_as_they_are_described(gateway: Gateway, document: dict[str, Any]) -> None:
    def check(name: str, answer: httpx.Response) -> None:
        assert answer.status_code == 200
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        Draft202012Validator(schema).validate(answer.json())

    check("ModelList", await gateway.http.get("/v1/models"))
    check("Model", await gateway.http.get(f"/v1/models/{MODEL}"))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    check("ChatCompletion", await gateway.http.post("/v1/chat/completions", json=chat))
    scored = chat | {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True, "timings_per_token": True}
    check("ChatCompletion", await gateway.http.post("/v1/chat/completions", json=scored))
    text = {"model": MODEL, "prompt": "x", "max_tokens": 3}
    check("Completion", await gateway.http.post("/v1/completions", json=text))
    check("Completion", await gateway.http.post("/v1/completions", json=text | {"logprobs": 2}))


async def test_chunks_are_as_they_are_described(gateway: Gateway, document: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/ChatCompletionChunk", "components": document["components"]}
    stream = await gateway.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=3,
        stream=True,
        logprobs=True,
        top_logprobs=1,
    )
    async for chunk in stream:
        Draft202012Validator(schema).validate(chunk.model_dump(exclude_unset=True))


@pytest.mark.parametrize(
    ("name", "value", "is_right"),
    [
        ("Message", {"role": "assistant"}, True),
        ("Message", {"role": "assistant", "content": None, "tool_calls": [], "refusal": "no"}, True),
        ("Message", {"role": "tool"}, False),
        ("Message", {"role": "user", "content": None}, False),
        ("Message", {"role": "user", "content": [{"type": "text", "text": "Hi"}]}, True),
        ("Message", {"role": "user", "content": "Hi", "tool_calls": [1]}, True),  # not looked at
        (
            "ChatRequest",
            {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "structured_outputs": {}},
            False,
        ),
    ],
    ids=str,
)
async def test_what_is_refused_is_said(document: dict[str, Any], name: str, value: Any, is_right: bool) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    assert Draft202012Validator(schema).is_valid(value) is is_right


async def test_defaults_are_plain_values_and_forms_have_names(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        assert all("$ref" in form or "properties" not in form for form in schema.get("oneOf", ())), name
    for part in within(document):
        if isinstance(part.get("type"), str):
            assert not isinstance(part.get("default"), dict | list), part
