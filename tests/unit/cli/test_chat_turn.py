"""A streamed answer in the terminal, put together from its chunks."""

from __future__ import annotations

import io
from typing import Any

from cli.chat.__main__ import show
from cli.chat.screen import Screen
from cli.chat.turn import Turn


def test_calls_come_in_parts_and_go_back_whole() -> None:
    turn = Turn()
    shown = [
        turn.take(delta)
        for delta in (
            {"role": "assistant", "content": ""},
            {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "get_weather", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "set_timer", "arguments": "{}"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
            {"content": "Done."},
        )
    ]
    assert "".join(shown) == "Done."
    assert turn.as_message() == {
        "role": "assistant",
        "content": "Done.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
            {"id": "b", "type": "function", "function": {"name": "set_timer", "arguments": "{}"}},
        ],
    }


def test_thoughts_are_folded_to_a_line_before_the_answer() -> None:
    turn, out = Turn(), io.StringIO()
    screen = Screen(out, is_terminal=False)
    for delta in (
        {"reasoning_content": "I add "},
        {"reasoning_content": "7 and 5."},
        {"content": "\n\n12"},
        {"content": "!"},
    ):
        is_folded = bool(turn.thoughts) and not turn.text
        show(turn, turn.take(delta), screen, is_folded=is_folded)
    assert out.getvalue() == "(thought 5 words; /thoughts shows them)\n12!"
    assert "tool_calls" not in turn.as_message()


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": None}]}


def test_the_pace_of_an_answer() -> None:
    turn = Turn(asked_at=10.0)
    assert turn.pace() == ""
    turn.chunk(chunk(role="assistant", content=""), 10.1)
    turn.chunk(chunk(reasoning_content="hm"), 10.25)
    turn.chunk(chunk(content="a"), 11.25)
    assert turn.pace() == "first token 250 ms · 2 tokens · 1.0 tokens/s"
    usage = {"completion_tokens": 5, "prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    turn.chunk({"choices": [{"delta": {}, "finish_reason": "length"}]}, 11.3)
    turn.chunk({"choices": [], "usage": usage}, 11.3)
    assert turn.pace() == (
        "first token 250 ms · 5 tokens · 4.0 tokens/s · 40 prompt tokens, 32 cached · cut at the longest length"
    )


def test_an_error_within_a_stream_is_kept() -> None:
    turn = Turn()
    assert turn.chunk({"error": {"message": "no memory"}}, 1.0) == ""
    assert turn.error == "no memory"
