"""Agents' sessions: their shape, and what an agent counts as reusable and found."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from benchmarks.sessions import agents, replay
from benchmarks.sessions.simulated import Simulated
from benchmarks.sessions.trace import CONTEXT, TURNS, longest_prompt, sessions
from common.messages import KVLayout


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


@pytest.mark.parametrize(("num_slots", "found"), [(0, 0), (300, 10 * 96)])
def test_a_simulated_tier_finds_what_the_pool_gave_up(num_slots: int, found: int) -> None:
    layout = KVLayout(num_blocks=20, num_layers=1, block_size=16, num_kv_heads=1, head_dim=1, dtype="float32")
    worker, prompts = Simulated(layout, num_slots=num_slots), [[number] * 100 for number in range(10)]
    assert sum(worker.ask(prompt) for prompt in prompts) == 0
    assert sum(worker.ask(prompt) for prompt in prompts) == found


def test_a_trace_is_played_as_it_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With room for all the simulation finds what was there before."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 512 * len(hashes) + 100, "output_length": 5, "hash_ids": [*hashes, 99 + at]}
        for at, hashes in enumerate([[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6]])
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [
        "--out",
        str(tmp_path),
        "--trace",
        str(trace),
        "--simulate-only",
        "--pool-gb",
        "10",
        "--block-tokens",
        "16",
    ]
    assert replay.main(options) == 0
    shares = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert shares["seen_before"] == shares["pool_simulated"] == shares["host_simulated"]
    assert float(shares["seen_before"]) == pytest.approx(100 * 5 * 16 / (11 * 16 + 4 * 3), abs=0.01)
    with pytest.raises(SystemExit):
        replay.main([*options, "--block-tokens", "20"])
