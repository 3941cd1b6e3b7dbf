"""A streamed answer in the terminal, put together from its deltas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.chat.__main__ import _show, _tools
from cli.chat.turn import Turn
from common.settings import ConfigError

DEMO_TOOLS = Path(__file__).resolve().parents[3] / "demo" / "tools.json"


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


def test_thoughts_are_folded_to_a_line_before_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    turn = Turn()
    for delta in (
        {"reasoning_content": "I add "},
        {"reasoning_content": "7 and 5."},
        {"content": "\n\n12"},
        {"content": "!"},
    ):
        _show(turn, delta)
    assert capsys.readouterr().out == "(thought 5 words; /thoughts shows them)\n12!"
    assert "tool_calls" not in turn.as_message()


def test_a_file_of_tools_is_a_list(tmp_path: Path) -> None:
    assert [tool["function"]["name"] for tool in _tools(str(DEMO_TOOLS))] == ["get_weather", "set_timer"]
    wrong = tmp_path / "tools.json"
    wrong.write_text(json.dumps({"type": "function"}))
    for path, words in ((wrong, "a list of tools"), (tmp_path / "nothing", "No such file")):
        with pytest.raises(ConfigError, match=words):
            _tools(str(path))
