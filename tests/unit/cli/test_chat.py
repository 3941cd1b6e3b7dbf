"""`baton chat`: commands, what is typed, Markdown in blocks, and whole conversations with a server of this test."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.chat.__main__ import converse, talk_of
from cli.chat.commands import COMMANDS, AskAgainError, LeaveError, is_command, names, run
from cli.chat.screen import Blocks, Screen, rows_of, trimmed
from cli.chat.settings import ChatSettings
from cli.chat.talk import Talk, read_tools
from cli.chat.turn import Turn
from cli.chat.typed import Typed
from common.settings import ConfigError
from services.runtime.loading import load_settings

DEMO_TOOLS = Path(__file__).resolve().parents[3] / "demo" / "tools.json"


def a_talk() -> Talk:
    return Talk(model="m", models=["m", "n"])


# -- commands ------------------------------------------------------------------------------------------------------


def test_what_is_a_command() -> None:
    assert [line for line in ("/help", "/set a 1", "/usr/bin is what?", "a /help", "/?", "/") if is_command(line)] == [
        "/help",
        "/set a 1",
        "/?",
    ]


def test_every_command_is_in_the_help_and_in_the_completion() -> None:
    said = run("/help", a_talk())
    assert all(f"/{name}" in said and f"/{name}" in names() for name in COMMANDS if name != "?")
    assert "/bye" in said


def test_commands_change_the_next_request() -> None:
    talk = a_talk()
    for line in ("/set system Be brief.", "/set temperature 0", "/set seed 7", "/think off", "/model n"):
        run(line, talk)
    run(f"/tools {DEMO_TOOLS}", talk)
    talk.messages.append({"role": "user", "content": "hi"})
    body = talk.body()
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert (body["model"], body["temperature"], body["seed"]) == ("n", 0, 7)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert [tool["function"]["name"] for tool in body["tools"]] == ["get_weather", "set_timer"]
    for line in ("/system off", "/set temperature default", "/tools off", "/clear"):
        run(line, talk)
    assert talk.body()["messages"] == []
    assert not {"temperature", "tools"} & talk.body().keys()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/hepl", "did you mean /help"),
        ("/zzz", "/help lists them"),
        ("/set warmth 1", "no option 'warmth'"),
        ("/set top_k many", "a number is needed"),
        ("/set top_k", "/set top_k VALUE"),
        ("/model o", "m, n"),
        ("/think maybe", "/think on, or /think off"),
        ("/save", "/save FILE"),
        ("/load /nothing/there", "No such file"),
        ("/tools /nothing/there", "No such file"),
        ("/retry", "nothing was asked"),
    ],
)
def test_what_a_command_can_t_do_is_said(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(line, a_talk())


def test_leaving_and_asking_again() -> None:
    for line in ("/bye", "/exit", "/quit"):
        with pytest.raises(LeaveError):
            run(line, a_talk())
    talk = a_talk()
    talk.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(AskAgainError):
        run("/retry", talk)
    assert talk.messages == [{"role": "user", "content": "a"}]


def test_a_conversation_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    talk, file = a_talk(), tmp_path / "talk.json"
    talk.system, talk.messages = "Be brief.", [{"role": "user", "content": "¿qué?"}]
    run("/set seed 3", talk)
    assert run(f"/save {file}", talk) == f"1 messages saved in {file}"
    other = a_talk()
    run(f"/load {file}", other)
    assert (other.system, other.messages, other.options) == (talk.system, talk.messages, {"seed": 3})
    for wrong in ("[]", "{}", '{"messages": [1]}', '{"messages": [], "options": {"url": 1}}', "{"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="not a conversation"):
            run(f"/load {file}", other)


def test_a_file_of_tools_is_a_list(tmp_path: Path) -> None:
    wrong = tmp_path / "tools.json"
    wrong.write_text(json.dumps({"type": "function"}))
    with pytest.raises(ConfigError, match="a list of tools"):
        read_tools(str(wrong))


def test_a_question_without_an_answer_is_forgotten_with_its_calls() -> None:
    talk = a_talk()
    talk.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = list(talk.messages)
    talk.messages += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "", "tool_calls": [1]}]
    talk.messages += [{"role": "tool", "content": "d"}]
    talk.heard(Turn(error="HTTP 500"))
    assert talk.messages == before


# -- typing --------------------------------------------------------------------------------------------------------


def typed(*lines: str) -> Typed:
    left = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return Typed(ask)


def test_lines_and_texts_of_several_lines() -> None:
    reader = typed(" one ", '"""two', "  and", "", 'more"""', '"""three"""', '"""', "four", '"""', '"""open')
    assert [reader.read() for _ in range(4)] == ["one", "two\n  and\n\nmore", "three", "four"]
    with pytest.raises(EOFError):
        reader.read()


# -- Markdown ------------------------------------------------------------------------------------------------------

TEXT = "# Title\n\nA *word*\nand more.\n\n```python\nif a:\n\n    b\n```\n- one\n\n\n- two"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blocks_end_at_empty_lines_outside_code_however_the_text_comes(size: int) -> None:
    blocks, ended = Blocks(), list[str]()
    for at in range(0, len(TEXT), size):
        ended += blocks.take(TEXT[at : at + size])
    assert "".join(ended) + blocks.open == TEXT
    assert [block.strip() for block in ended] == [
        "# Title",
        "A *word*\nand more.",
        "```python\nif a:\n\n    b\n```",
        "- one",
    ]
    assert blocks.open.strip() == "- two"


def test_rows_on_a_terminal() -> None:
    assert [rows_of(text, 4, len) for text in ("", "abcd", "abcde", "a\nb", "abcde\n", "\n\n")] == [0, 0, 1, 1, 2, 2]


def test_a_drawn_block_has_no_empty_edges() -> None:
    assert trimmed("\x1b[1m  \x1b[0m\n\x1b[1ma\x1b[0m\n\n b\n\n") == "\x1b[1ma\x1b[0m\n\n b"
    assert trimmed(" \n") == ""


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_each_block_is_drawn_once_and_in_order(size: int) -> None:
    out, drawn = io.StringIO(), list[str]()
    screen = Screen(out, is_terminal=True, render=drawn.append)
    for at in range(0, len(TEXT), size):
        screen.text(TEXT[at : at + size])
    screen.end()
    assert "".join(drawn) == TEXT
    assert len(drawn) == 5


def test_a_model_s_words_command_no_terminal() -> None:
    out = io.StringIO()
    screen = Screen(out, is_terminal=True)
    screen.text("a\x1b[2J\tb\nc\x9b1m 👩‍🚀")
    screen.note("x\x07")
    assert out.getvalue() == "a\\x1b[2J\tb\nc\\x9b1m 👩‍🚀\x1b[2mx\\x07\x1b[0m\n"


# -- conversations -------------------------------------------------------------------------------------------------


def events(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def says(text: str) -> bytes:
    return events({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]})


def talked(answers: list[httpx.Response | bytes], *lines: str) -> tuple[Talk, str, list[Any]]:
    """What came of a chat whose server gives these answers; what was printed, and the requests."""
    asked: list[Any] = []
    left: Iterator[httpx.Response | bytes] = iter(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        answer = next(left)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, content=answer)

    talk, out = a_talk(), io.StringIO()
    with httpx.Client(transport=httpx.MockTransport(handle), base_url="http://baton") as client:
        converse(client, talk, typed(*lines), Screen(out, is_terminal=False))
    return talk, out.getvalue(), asked


def test_a_chat_remembers_and_an_empty_line_says_nothing() -> None:
    talk, printed, asked = talked([says("one"), says("two")], "a", "", "b", "/bye", "never")
    assert printed == "one\ntwo\n"
    assert [message["content"] for message in asked[1]["messages"]] == ["a", "one", "b"]
    assert [message["content"] for message in talk.messages] == ["a", "one", "b", "two"]
    assert talk.turns == 2


def test_a_refused_message_is_not_sent_again_with_the_next() -> None:
    refused = httpx.Response(400, json={"error": {"message": "too long"}})
    _, printed, asked = talked([refused, says("two")], "a", "b")
    assert printed == "(too long)\ntwo\n"
    assert [message["content"] for message in asked[1]["messages"]] == ["b"]


def test_a_function_is_called_and_its_result_goes_back() -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = events({"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "x", "function": function}]}}]})
    talk, printed, asked = talked([call, says("Sunny.")], "weather?", "sun")
    assert '-> get_weather({"city": "Paris"})' in printed
    assert asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "x", "content": "sun"}
    assert talk.messages[-1]["content"] == "Sunny."
    talk, _, _ = talked([call], "weather?")  # the input ends where a result is needed
    assert talk.messages == []


@pytest.mark.parametrize("wrong", [b"data: {\n\n", b""])
def test_a_stream_that_breaks_off_ends_no_chat(wrong: bytes) -> None:
    first: Callable[[], bytes] = lambda: events({"choices": [{"delta": {"content": "half"}}]})[:-14] + wrong  # noqa: E731
    talk, printed, _ = talked([first(), says("two")], "a", "b")
    assert "half\n" in printed
    assert printed.endswith("two\n")
    assert [message["content"] for message in talk.messages] == ["a", "half", "b", "two"]


def test_retry_answers_the_same_question_again() -> None:
    talk, _, asked = talked([says("one"), says("other")], "a", "/retry")
    assert asked[0]["messages"] == asked[1]["messages"]
    assert [message["content"] for message in talk.messages] == ["a", "other"]


def test_what_set_takes_is_an_option_of_the_command_too() -> None:
    def talk_with(*flags: str) -> Talk:
        return talk_of(load_settings(ChatSettings, command="chat", arguments=flags, environment={}), {"m": ("chat",)})

    def options(*flags: str) -> dict[str, Any]:
        return talk_with(*flags).options

    assert options() == {"temperature": 0.7}
    assert options("--set", "max_tokens=6,seed=1", "--set", "temperature=default") == {"max_tokens": 6, "seed": 1}
    assert talk_with("--set", "think=on").think is True
    assert talk_with("--system", "Be brief, and kind.").system == "Be brief, and kind."
    both = talk_with("--set", "system=Be brief, and kind.", "--set", "seed=1")
    assert (both.system, both.options["seed"]) == ("Be brief, and kind.", 1)
    for wrong in ("max_tokens", "warmth=1", "seed=a", "think=maybe"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            options("--set", wrong)


def test_markdown_and_history_are_switched_in_the_chat() -> None:
    talk = a_talk()
    assert (talk.switches.draws_markdown, talk.switches.keeps_history) == (True, True)
    for line in ("/markdown off", "/history off"):
        run(line, talk)
    assert (talk.switches.draws_markdown, talk.switches.keeps_history) == (False, False)
