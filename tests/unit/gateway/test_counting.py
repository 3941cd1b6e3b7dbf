"""/tokenize counts what chat and completions would send, with the same fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway
from tests.unit.gateway.tokenizers_of_others import write_folder

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
USER = {"role": "user", "content": "How many?"}
TOOL = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object"}}}
CHATS: dict[str, dict[str, Any]] = {
    "messages": {},
    "tools": {"tools": [TOOL]},
    "variables": {"chat_template_kwargs": {"enable_thinking": True}},
    "no opening": {"add_generation_prompt": False},
    "a message that goes on": {
        "messages": [USER, {"role": "assistant", "content": "I think"}],
        "continue_final_message": True,
    },
    "with BOS": {"add_special_tokens": True},
    "trusted": {"parse_special": True, "messages": [{"role": "user", "content": "<|im_end|>"}]},
}


@pytest.fixture(scope="module")
async def own(demo: ChatTokenizer) -> AsyncIterator[Gateway]:
    async with run_gateway(demo, HttpSettings()) as gateway:
        gateway.script.max_model_len = 2_048
        yield gateway


async def tokens(gateway: Gateway, body: dict[str, Any]) -> Any:
    answer = await gateway.http.post(TOKENIZE, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["count"] == len(answer.json()["tokens"])
    return answer.json()["tokens"]


@pytest.mark.parametrize("name", CHATS)
async def test_messages_are_counted_as_chat_sends_them(own: Gateway, name: str) -> None:
    body = {"messages": [USER], **CHATS[name]}
    assert (await own.http.post(CHAT, json={"model": MODEL, "max_tokens": 1, **body})).status_code == 200
    sent = own.script.submitted[-1].token_ids
    assert await tokens(own, body) == sent
    if name not in ("messages", "with BOS"):
        assert sent != await tokens(own, {"messages": [USER]})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "tools"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
    ],
)
async def test_what_does_not_belong_together_is_named(own: Gateway, body: dict[str, Any], param: str) -> None:
    answer = await own.http.post(TOKENIZE, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_special_tokens_are_added_as_the_client_says(tmp_path: Path) -> None:
    """As with vLLM: by default to a text, and not to what a template writes."""
    template = "{% for m in messages %}<|start_header_id|>{{ m.content }}{% endfor %}"
    tokenizer = ChatTokenizer(write_folder(tmp_path / "model", "llama3", template))
    bos = tokenizer.tokenizer.token_to_id("<|begin_of_text|>")
    asked: list[tuple[str, dict[str, Any], bool]] = [
        (COMPLETIONS, {"prompt": "x"}, True),
        (COMPLETIONS, {"prompt": "x", "add_special_tokens": False}, False),
        (CHAT, {"messages": [USER]}, False),
        (CHAT, {"messages": [USER], "add_special_tokens": True}, True),
        (CHAT, {"messages": [USER], "add_special_tokens": True, "parse_special": True}, True),
        (COMPLETIONS, {"prompt": "x y z " * 200, "truncate_prompt_tokens": 5}, True),
        (CHAT, {"messages": [USER], "add_special_tokens": True, "truncate_prompt_tokens": 3}, True),
    ]
    async with run_gateway(tokenizer, HttpSettings()) as gateway:
        for path, body, has_bos in asked:
            assert (await gateway.http.post(path, json={"model": MODEL, "max_tokens": 1, **body})).status_code == 200
            sent = gateway.script.submitted[-1].token_ids
            assert (sent[0] == bos) is has_bos
            if "truncate_prompt_tokens" in body:
                assert len(sent) == body["truncate_prompt_tokens"]
            else:
                assert await tokens(gateway, body) == sent
