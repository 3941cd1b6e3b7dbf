"""Agents' sessions: their shape, and what an agent counts as reusable and found."""

from __future__ import annotations

import json

import httpx
import pytest

from benchmarks.sessions import agents
from benchmarks.sessions.trace import CONTEXT, TURNS, longest_prompt, sessions


def test_sessions_have_the_shape_of_recorded_ones() -> None:
    (session,) = sessions(1, turns=TURNS, context=CONTEXT, pause_s=60, vocab_size=1000)
    length, prompts, reusable = 0, 0, 0
    for turn in session:
        reusable += length
        prompts += length + len(turn.new_tokens)
        length += len(turn.new_tokens) + turn.answer_tokens
    assert prompts / TURNS == pytest.approx(CONTEXT, rel=0.01)
    assert reusable / prompts > 0.95
    assert {turn.answer_tokens for turn in session} == {444}
    assert longest_prompt(session) == length


def test_sessions_share_nothing_and_come_again_from_the_same_seed() -> None:
    asked = {"turns": 3, "context": 300, "pause_s": 0.0, "vocab_size": 1000}
    first, second = sessions(2, **asked)  # type: ignore[arg-type]
    assert list(first[0].new_tokens[:16]) != list(second[0].new_tokens[:16])
    assert sessions(2, **asked) == [first, second]  # type: ignore[arg-type]


async def test_an_agent_goes_on_from_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(body["prompt"])
        tokens = [len(asked)] * body["max_tokens"]
        events = [
            {"choices": [{"token_ids": tokens}]},
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 16 * len(asked)}}},
        ]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text)

    client = httpx.AsyncClient
    monkeypatch.setattr(
        agents.httpx,
        "AsyncClient",
        lambda **options: client(transport=httpx.MockTransport(answer), base_url="http://b"),
    )
    (session,) = sessions(1, turns=3, context=100, pause_s=0.0, vocab_size=50)
    played = await agents.play("http://b", "m", [session])
    assert [each.error for each in played] == ["", "", ""]
    assert [each.cached for each in played] == [16, 32, 48]
    assert played[1].reusable == len(asked[0]) + len(played[0].answer)
    assert asked[1][: len(asked[0])] == asked[0]
    assert asked[1][len(asked[0]) :][: len(played[0].answer)] == played[0].answer
    assert [len(prompt) for prompt in asked] == [each.prompt_tokens for each in played]
