"""`suffix` and `best_of` of completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from tests.models import build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

MARKS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")
BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"


@pytest.fixture(scope="module")
async def coding(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("coder")
    build_tokenizer(folder, added=MARKS)
    async with run_gateway(ChatTokenizer(folder), HttpSettings()) as gateway:
        yield gateway


async def complete(gateway: Gateway, **fields: Any) -> Any:
    options = {"model": MODEL, "prompt": BEFORE, "suffix": AFTER} | fields
    return await gateway.openai.completions.create(**options)


async def test_the_answer_stands_between_prompt_and_suffix(coding: Gateway) -> None:
    coder = coding.tokenizer

    def latest() -> str:
        return coder.decode(coding.script.submitted[-1].token_ids, skip_special_tokens=False)

    answer = await complete(coding)
    assert latest() == f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    stops = {coder.tokenizer.token_to_id(text) for text in ("<|fim_pad|>", "<|im_end|>")}
    assert stops <= set(coding.script.submitted[-1].sampling.stop_token_ids)
    streamed = [chunk.choices[0].text async for chunk in await complete(coding, stream=True) if chunk.choices]
    assert "".join(streamed) == answer.choices[0].text
    await complete(coding, prompt="")
    assert latest() == f"<|fim_prefix|><|fim_suffix|>{AFTER}<|fim_middle|>"
    await complete(coding, suffix="")
    assert latest() == BEFORE


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"prompt": [5, 6]}, "only with prompts of text"), ({"echo": True}, "not together with echo")],
)
async def test_what_suffix_does_not_go_with_is_refused(coding: Gateway, fields: dict[str, Any], told: str) -> None:
    answer = await coding.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "suffix": "y"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert told in answer.json()["error"]["message"]


async def test_models_without_marks_refuse_suffix_by_name(gateway: Gateway) -> None:
    answer = await gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "suffix": "y"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "suffix")
    assert "this model has no tokens for a text between two others" in error["message"]


async def test_the_likeliest_of_best_of_are_told(gateway: Gateway, tokenizer: ChatTokenizer) -> None:
    texts = ["red", "green", "blue"] * 2
    gateway.script.script = lambda spec: tokenizer.encode(texts[int(spec.request_id.rpartition("-")[2])])
    likely = {token: value for text, value in (("red", -3.0), ("blue", -1.0)) for token in tokenizer.encode(text)}
    gateway.script.logprob = lambda token: likely.get(token, -2.0)
    answer = await gateway.openai.completions.create(model=MODEL, prompt=["a", "b"], n=2, best_of=3, echo=True)
    assert [(choice.index, choice.text, choice.logprobs) for choice in answer.choices] == [
        (0, "ablue", None), (1, "agreen", None), (2, "bblue", None), (3, "bgreen", None),
    ]  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(tokenizer.encode(text)) for text in texts)
