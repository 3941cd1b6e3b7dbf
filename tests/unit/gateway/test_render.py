"""A request's prompt without an answer: the tokens that the same request generates from, in the form that routers read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.conftest import MODEL, Gateway

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe 🙂?"}],
    "max_tokens": 4,
}
OPENED = {"role": "assistant", "content": "It is"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [*CHAT["messages"], OPENED], "continue_final_message": True, "stream": True},
        ),
        ("/v1/messages", CHAT | {"messages": CHAT["messages"][1:], "system": "Be brief."}),
        ("/v1/completions", {"model": MODEL, "prompt": "Größe", "max_tokens": 4}),
        ("/v1/completions", {"model": MODEL, "prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "max_tokens": 4}),
    ],
)
async def test_the_rendered_prompt_is_the_one_that_is_answered(
    path: str, body: dict[str, Any], gateway: Gateway
) -> None:
    rendered = await gateway.http.post(f"{path}/render", json=body)
    assert rendered.status_code == 200, rendered.text
    assert gateway.script.submitted == []
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told = rendered.json()
    (told,) = told if path == "/v1/completions" else [told]
    assert told["token_ids"] == list(gateway.script.submitted[-1].token_ids)
    assert told["prompt"] == gateway.tokenizer.decode(told["token_ids"], skip_special_tokens=False)
    assert told["model"] == MODEL
    assert told["request_id"] == rendered.headers["x-request-id"]


async def test_each_prompt_of_a_completion_is_an_object(gateway: Gateway) -> None:
    prompts = ["Hello", "Good bye"]
    told = (await gateway.http.post("/v1/completions/render", json={"model": MODEL, "prompt": prompts})).json()
    assert [each["token_ids"] for each in told] == [gateway.tokenizer.encode(text) for text in prompts]


async def test_what_would_be_refused_is_refused(gateway: Gateway) -> None:
    for wrong, status in (({"model": "other"}, 404), ({"messages": []}, 400), ({"temperature": -1}, 400)):
        answer = await gateway.http.post("/v1/chat/completions/render", json=CHAT | wrong)
        assert answer.status_code == status, answer.text
    long = {"model": MODEL, "prompt": "word " * 3_000}
    answer = await gateway.http.post("/v1/completions/render", json=long)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
