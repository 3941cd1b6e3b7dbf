"""A model's own patterns that backtrack: one answer ends with an error that says why, and nobody else waits for it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.parsing.choose import choose
from gateway.parsing.parser import Parser
from gateway.parsing.terminals import ANSWER_S, PIECE_S, SHARE, Patience, Share, SlowPatternError
from tests.models import build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

SLOW = "(.*a){20}Z"
TEMPLATE: dict[str, Any] = {"fields": {"content": {}, "thinking": {"open_pattern": SLOW, "close": "</t>"}}}
CALLS = {
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": f"(?P<key>{SLOW})(?P<value>.*)"},
            "transform": {"name": "f", "arguments": "{content}"},
        },
    }
}
TEXT = "a" * 400


class Greedy:
    """Searches as long as it may."""

    def __init__(self) -> None:
        self.granted: list[float] = []

    def search(self, text: str, *, timeout: float, **options: Any) -> None:
        self.granted.append(timeout)
        until = time.thread_time() + timeout / 2
        while time.thread_time() < until:
            pass


def until_refused(patience: Patience, greedy: Greedy) -> int:
    """How many searches there were."""
    for count in itertools.count():
        try:
            patience.timed(greedy.search, "")
        except SlowPatternError:
            return count
    raise AssertionError


def say(template: dict[str, Any], text: str) -> None:
    parser = Parser(choose("", {}, response_template=template), {"f": {}})
    for character in text:
        parser.text(character)
    parser.finish(is_whole=True)


def test_an_answer_has_its_time_however_many_pieces_it_comes_in() -> None:
    greedy = Greedy()
    until_refused(Patience(Share()), greedy)
    assert max(greedy.granted) <= ANSWER_S + PIECE_S
    assert greedy.granted == sorted(greedy.granted, reverse=True)


def test_a_model_has_its_share_however_many_answers_there_are() -> None:
    now, greedy = [0.0], Greedy()
    share = Share(lambda: now[0])
    until_refused(Patience(share), greedy)
    with pytest.raises(SlowPatternError):
        Patience(share).timed(greedy.search, "")
    now[0] += ANSWER_S / SHARE / 2
    assert share.left() <= ANSWER_S / 2
    assert until_refused(Patience(share), greedy) > 0
    now[0] += 1_000
    assert share.left() == ANSWER_S


def test_quick_patterns_cost_nothing() -> None:
    patience = Patience(Share(lambda: 0.0))
    for _ in range(1_000):
        patience.timed(lambda text, timeout: None, "")
    assert patience._left > ANSWER_S / 2


@pytest.mark.parametrize(("template", "text"), [(TEMPLATE, TEXT), (CALLS, f"<call>{TEXT}</call>")])
def test_a_pattern_that_backtracks_is_given_up(template: dict[str, Any], text: str) -> None:
    with pytest.raises(SlowPatternError, match="a pattern in this model's response_template takes too long"):
        say(template, text)
    say(template, text.replace("a", "b"))


@pytest.fixture(scope="module")
async def hostile(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    build_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"response_template": TEMPLATE}))
    async with run_gateway(ChatTokenizer(folder), HttpSettings()) as gateway:
        gateway.script.max_model_len = 4096
        yield gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_its_client_is_told_and_others_are_served(hostile: Gateway, stream: bool) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    ids = hostile.tokenizer.encode(TEXT, add_special_tokens=False)
    hostile.script.script = lambda spec: [*ids, *hostile.tokenizer.eos_ids]
    answer = await hostile.http.post("/v1/chat/completions", json=body)
    assert "response_template takes too long" in answer.text
    assert answer.status_code == (200 if stream else 500)
    plain = await hostile.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})
    assert plain.status_code == 200
