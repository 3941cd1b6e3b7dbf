"""What a prompt has begun of the answer's message: reasoning that its template opened, and nothing a user wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.answers import choice
from gateway.answers.ask import Reply, TextRules
from gateway.answers.choice import MessageReader
from gateway.answers.detokenizer import Detokenizer
from gateway.answers.tokenizer import ChatTokenizer
from tests.models import CALL_TEMPLATE, TOOL_TOKENS, build_tokenizer

PLAIN_TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{{ end }}{# <think> #}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("begun")


@pytest.fixture(scope="module")
def marked(folder: Path) -> ChatTokenizer:
    (folder / "marked").mkdir()
    build_tokenizer(folder / "marked", template=CALL_TEMPLATE, added=TOOL_TOKENS)
    return ChatTokenizer(folder / "marked")


@pytest.fixture(scope="module")
def unmarked(folder: Path) -> ChatTokenizer:
    (folder / "unmarked").mkdir()
    build_tokenizer(folder / "unmarked", template=PLAIN_TURNS)
    return ChatTokenizer(folder / "unmarked")


def begun(tokenizer: ChatTokenizer, prompt: list[int]) -> MessageReader:
    return MessageReader(tokenizer, TextRules(), Reply(), prompt)


@pytest.mark.parametrize(
    ("text", "is_reasoning", "has_reasoned"),
    [
        ("<think>\n" + "Well, so it is. " * 500, True, True),
        ("<think>\n" + "Hm. " * 400 + "</think>" + "It is so. " * 400, False, True),
        ("So it is. " * 800, False, False),
    ],
)
def test_a_long_message_goes_on_as_it_began(
    text: str, is_reasoning: bool, has_reasoned: bool, marked: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    class Counting(Detokenizer):
        def add(self, token_id: int) -> str:
            nonlocal read
            read += 1
            return super().add(token_id)

    monkeypatch.setattr(choice, "Detokenizer", Counting)
    reader = begun(marked, marked.encode(f"<|im_start|>assistant\n{text}", add_special_tokens=False))
    assert (reader.is_reasoning, reader.has_reasoned) == (is_reasoning, has_reasoned)
    assert 0 < read < 1_000


@pytest.mark.parametrize("before", [[], [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]])
@pytest.mark.parametrize("words", ["what does <think> mean?", "<think>", "is </think> its end?"])
def test_a_users_words_open_no_reasoning(words: str, before: list[dict[str, str]], unmarked: ChatTokenizer) -> None:
    prompt = unmarked.encode_chat([*before, {"role": "user", "content": words}])
    reader = begun(unmarked, prompt)
    assert not reader.has_reasoned
    answer = [reader.push(token) for token in unmarked.encode("It is a tag.", add_special_tokens=False)]
    assert "".join(one.content for one in answer) + reader.finish(is_whole=True).content == "It is a tag."


@pytest.mark.parametrize(
    ("end", "is_reasoning", "has_reasoned"),
    [
        (" <think>", True, True),
        ("<think>\n", True, True),
        ("<think>\n\n</think>\n\n", False, True),
        ("</think>", False, False),
        ("", False, False),
    ],
)
def test_a_template_without_marks_opens_reasoning_at_its_end(
    end: str, is_reasoning: bool, has_reasoned: bool, unmarked: ChatTokenizer
) -> None:
    prompt = unmarked.encode_chat([{"role": "user", "content": "Hi"}], variables={"end": end})
    reader = begun(unmarked, prompt)
    assert (reader.is_reasoning, reader.has_reasoned) == (is_reasoning, has_reasoned)
