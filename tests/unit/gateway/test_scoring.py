"""Logprobs of prompts, and answers without a token, as clients that score texts use them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from common.messages import SamplingParams
from gateway.answers import start
from gateway.request.spec import GenerationSpec
from gateway.request.state import RequestState
from tests.unit.gateway.conftest import MODEL, Gateway

PROMPT = "How are you, Baton?"


async def complete(gateway: Gateway, **options: Any) -> Any:
    return await gateway.openai.completions.create(**({"model": MODEL, "prompt": PROMPT, "logprobs": 2} | options))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_echoed_prompt_comes_with_its_logprobs(gateway: Gateway, stream: bool) -> None:
    answer = await complete(gateway, echo=True, max_tokens=3, stream=stream)
    parts = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert "".join(part.text for part in parts).startswith(PROMPT)
    tokens = [token for part in parts for token in part.logprobs.tokens]
    values = [value for part in parts for value in part.logprobs.token_logprobs]
    tops = [top for part in parts for top in part.logprobs.top_logprobs]
    ids = gateway.tokenizer.encode(PROMPT)
    assert tokens[: len(ids)] == [gateway.tokenizer.token_text(token) for token in ids]
    assert (values[0], tops[0]) == (None, None), "nothing is known of the first token"
    assert values[1 : len(ids)] == pytest.approx([-token / 1024 for token in ids[1:]])
    assert [next(iter(top)) for top in tops[1 : len(ids)]] == tokens[1 : len(ids)]
    assert values[len(ids) :] == [-0.5] * 3
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    assert offsets[: len(ids)] == [0, *accumulate(map(len, tokens[: len(ids) - 1]))]
    assert offsets[len(ids)] == len(PROMPT)


async def test_a_prompt_can_be_scored_without_an_answer(gateway: Gateway) -> None:
    """What evaluation harnesses send for multiple choice."""
    scored = await complete(gateway, echo=True, max_tokens=0)
    (choice,) = scored.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert len(choice.logprobs.tokens) == scored.usage.prompt_tokens == scored.usage.total_tokens
    assert scored.usage.completion_tokens == 0


async def test_prompt_logprobs_name_token_rank_and_text(gateway: Gateway) -> None:
    ids = gateway.tokenizer.encode(PROMPT)
    said = await complete(gateway, logprobs=None, max_tokens=1, extra_body={"prompt_logprobs": 1})
    first, second, *_ = said.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    text = gateway.tokenizer.token_text(ids[1])
    assert second == {str(ids[1]): {"logprob": pytest.approx(-ids[1] / 1024), "rank": 1, "decoded_token": text}}
    messages: Any = [{"role": "user", "content": "Hi"}]
    chat = await gateway.openai.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
    assert "prompt_logprobs" not in chat.choices[0].model_extra


async def test_a_prompt_of_one_token_has_nothing_to_score(gateway: Gateway) -> None:
    said = await complete(gateway, prompt=[40], echo=True, max_tokens=0)
    assert said.choices[0].logprobs.token_logprobs == [None]


def test_a_new_attempt_is_asked_for_them_only_before_the_first_token() -> None:
    sampling = SamplingParams(max_tokens=5, prompt_logprobs=1)
    spec = GenerationSpec(request_id="r", token_ids=[1, 2], sampling=sampling, deadline_s=1.0)
    state = RequestState(spec=spec, deadline_at=1.0)
    assert state.sampling.prompt_logprobs == 1
    state.generated.append(7)
    assert state.sampling == SamplingParams(max_tokens=5)


async def test_more_than_a_message_holds_is_refused_with_the_remedy(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "MAX_SCORES_BYTES", 10 * (8 + 8 * 20))
    body = {"model": MODEL, "prompt": [40] * 11, "max_tokens": 1, "prompt_logprobs": 20}
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"
    assert "ask for fewer" in response.json()["error"]["message"]
