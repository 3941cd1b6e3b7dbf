"""Long prompts: cut into pieces without another token, refused by length before any work, one at a time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from gateway.answers import encoding, tokenising
from gateway.answers.ask import Conversation, Text, Tool
from gateway.answers.catalogue import Served
from gateway.answers.tokenising import Tokenising
from gateway.answers.tokenizer import ChatTokenizer
from gateway.http.problem import ContextLengthError
from gateway.templates.template import TooLongError
from tests.examples import examples
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, Gateway

ROOT = Path(__file__).resolve().parents[3]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_words = st.lists(
    st.sampled_from(
        ["the", "Quick", "a", "x", "<think>", "<|im_end|>", "</s>", "\n\n\n", "  ", "12", "Öl", "\ue000", "don't"]
    )
    | st.text(max_size=4),
    max_size=60,
).map(" ".join)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE_CHARS", 8)


@pytest.mark.usefixtures("small_pieces")
@examples(25)
@given(text=_words)
def test_pieces_have_the_tokens_of_the_whole(any_tokenizer: ChatTokenizer, text: str) -> None:
    whole = any_tokenizer.tokenizer.encode(text).ids
    assert any_tokenizer.encode(text) == whole
    assert any_tokenizer.encode(text, limit=len(whole) + 1) == whole
    messages = [{"role": "user", "content": text}]
    in_pieces = any_tokenizer.encode_chat(messages)
    shaded = any_tokenizer._chat_template().shaded(messages)
    named = any_tokenizer.controls.named(shaded, any_tokenizer.render(messages))
    assert in_pieces == any_tokenizer.controls.encode_named(named)
    assert any_tokenizer.lengths.fewest_tokens(text) <= len(any_tokenizer.encode(text, add_special_tokens=False))


@examples(25)
@given(text=_words, keep=st.integers(1, 40), small=st.sampled_from([8, 1 << 20]))
def test_the_end_of_a_text_has_the_tokens_of_the_whole(
    any_tokenizer: ChatTokenizer, text: str, keep: int, small: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "PIECE_CHARS", small)
        whole = any_tokenizer.encode(text, add_special_tokens=False)
        assert any_tokenizer.encode(text, add_special_tokens=False, keep=keep) == whole[-keep:]
        before, after = any_tokenizer.controls.around
        kept = any_tokenizer.encode(text, keep=keep + len(before) + len(after))
        assert kept == [*before, *whole[-keep:], *after]
        messages = [{"role": "user", "content": text}]
        assert any_tokenizer.encode_chat(messages, keep=keep) == any_tokenizer.encode_chat(messages)[-keep:]


@pytest.mark.parametrize("text", ["word " * 1_000_000, "今天天气很好" * 800_000, "x" * 5_000_000, "a, b; " * 800_000])
def test_the_end_of_a_long_text_takes_little_of_it(
    demo: ChatTokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    encode = demo.controls.encode_named
    monkeypatch.setattr(demo.controls, "encode_named", lambda part: (done.append(len(part)), encode(part))[1])
    assert len(demo.encode(text, parse_special=False, keep=2_000)) == 2_000
    assert sum(done) <= 2 * encoding.WHOLE_CHARS


def test_every_usual_shape_is_cut_and_bounded(any_tokenizer: ChatTokenizer) -> None:
    pieces = list(any_tokenizer.lengths._pieces("word " * 100_000))
    known = any_tokenizer.lengths.fewest_tokens("word " * 100_000)
    if any_tokenizer.tokenizer.token_to_id("▁the") is None or any_tokenizer.lengths._bytes_a_token is not None:
        assert known > 1_000
    assert len(pieces) > 10


@pytest.mark.parametrize(
    "text", ["x" * 5_000_000, "word " * 1_000_000, "今天天气很好" * 1_000_000, "eJwNyLkNgD8y\n" * 400_000]
)
def test_what_can_not_fit_is_refused_after_little_work(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ChatTokenizer(ROOT / "demo")
    done: list[int] = []
    encode = tokenizer.controls.encode_named
    monkeypatch.setattr(tokenizer.controls, "encode_named", lambda part: (done.append(len(part)), encode(part))[1])
    messages = [{"role": "user", "content": text}]
    with pytest.raises(TooLongError, match="at least"):
        tokenizer.encode_chat(messages, limit=2048)
    with pytest.raises(TooLongError, match="at least"):
        tokenizer.encode(text, limit=2048, parse_special=False)
    assert not done
    monkeypatch.setattr(tokenizer.lengths, "_bytes_a_token", 10_000)
    with pytest.raises(TooLongError, match="at least 20001 tokens"):
        tokenizer.encode_chat(messages, limit=20_000)
    assert sum(done) < 600_000


async def test_clients_hear_of_the_context_in_openais_words(gateway: Gateway) -> None:
    long = "word " * 10_000
    asked = {
        CHAT: ({"model": MODEL, "messages": [{"role": "user", "content": long}]}, "messages"),
        COMPLETIONS: ({"model": MODEL, "prompt": long}, "prompt"),
        "/tokenize": ({"prompt": long}, "prompt"),
    }
    for path, (body, name) in asked.items():
        answer = await gateway.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", name)
        assert error["message"].startswith("This model's maximum context length is 256 tokens. However, your ")
        assert error["message"].endswith(f" tokens. Please reduce the length of the {name}.")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 256}
    error = (await gateway.http.post(CHAT, json=body)).json()["error"]
    used = len(gateway.tokenizer.encode_chat(body["messages"]))
    assert error["param"] == "max_tokens"
    assert error["message"] == (
        f"This model's maximum context length is 256 tokens. However, you requested {used + 256} tokens ({used} in the messages, "
        "256 in the completion). Please reduce the length of the messages or completion."
    )
    assert gateway.script.submitted == []


def served(tokenizer: ChatTokenizer) -> Served:
    found = ScriptedGenerations(lambda spec: []).catalogue(tokenizer).find(MODEL)
    assert found is not None
    return found


async def test_a_rendered_prompt_that_is_too_long(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.templates.template.MAX_RENDERED_CHARS", 1_000)
    long = Conversation(messages=[{"role": "user", "content": "a" * 1_001}])
    with pytest.raises(ContextLengthError, match=r"maximum context length is 256 tokens.*more than 1000 characters"):
        await Tokenising().tokens(long, served(tokenizer), name="messages")


async def test_long_prompts_go_one_after_the_other(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    going, most, go_on = 0, 0, threading.Event()

    def encode(text: str, **_: object) -> list[int]:
        nonlocal going, most
        going += 1
        most = max(most, going)
        go_on.wait(10)
        going -= 1
        return [1]

    monkeypatch.setattr(tokenizer, "encode", encode)
    monkeypatch.setattr(tokenising, "MAX_HELD_CHARS", 3 * tokenising.LONG_CHARS)
    room = Tokenising()
    long = Text("a" * tokenising.LONG_CHARS)
    waiting = [asyncio.create_task(room.tokens(long, served(tokenizer), name="prompt")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await room.tokens(long, served(tokenizer), name="prompt")
    go_on.set()
    assert await asyncio.gather(*waiting) == [[1]] * 3
    assert most == 1
    assert await room.tokens(long, served(tokenizer), name="prompt") == [1]


USER = {"role": "user", "content": "a"}
LONG = {
    "text": Text("a" * 501),
    "a tool's description": Conversation(messages=[USER], tools=[Tool(name="f", description="a" * 501)]),
    "names in a schema": Conversation(messages=[USER], tools=[Tool(name="f", parameters={"a" * 501: {}})]),
    "numbers in a schema": Conversation(messages=[USER], tools=[Tool(name="f", parameters={"enum": [0] * 501})]),
    "one number": Conversation(messages=[USER], variables={"a": 10**600}),
    "a variable's name": Conversation(messages=[USER], variables={"a" * 501: None}),
    "messages": Conversation(messages=[USER] * 9),
}


@pytest.mark.parametrize("prompt", [Text("a" * 499), Conversation(messages=[USER] * 8), *LONG.values()])
async def test_only_what_is_short_in_all_its_parts_holds_the_loop_up(
    demo: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, prompt: Text | Conversation
) -> None:
    here = list[bool]()

    def encode(*_: object, **__: object) -> list[int]:
        here.append(threading.current_thread() is threading.main_thread())
        return [1]

    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(demo, name, encode)
    assert await Tokenising().tokens(prompt, served(demo), name="prompt") == [1]
    assert here == [not any(prompt is one for one in LONG.values())]


async def test_waiting_behind_long_prompts_ends_with_the_deadline(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(gateway.tokenizer, "encode", lambda text, **_: (go_on.wait(10), [1])[1])
    answer = await gateway.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a" * 501, "timeout": 0.01})
    go_on.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, DeadlineExceededError.code)


def test_a_prompt_without_a_bound_is_a_clients_mistake() -> None:
    assert issubclass(TooLongError, InvalidRequestError)
