"""Chat templates that take too much are rendered in a child process, which ends for them; the gateway goes on serving."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequestError, OverloadedError, UnavailableError
from gateway.answers import tokenising
from gateway.answers.tokenising import Tokenising
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.templates import apart, template
from gateway.templates.sandbox import DearError
from gateway.templates.shade import Shade
from gateway.templates.template import ChatTemplate
from tests.models import CHAT_TEMPLATE, TOOL_TEMPLATE, build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

DEMO = Path(__file__).parents[3] / "demo" / "chat_template.jinja"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
THREE = "{% for a in range(3) %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = EXPRESSION %}{% endfor %}{{ n.x | length }}"
)
# Templates that take time or memory without an end.
HOSTILE = {
    "loops": LOOPS,
    "loops in a block": "{% set x %}" + LOOPS + "{% endset %}",
    "loops in a macro": "{% macro m() %}" + LOOPS + "{% endmacro %}{{ m() }}",
    "macros": "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "~": DOUBLED.replace("EXPRESSION", "n.x ~ n.x"),
    "+": DOUBLED.replace("EXPRESSION", "n.x + n.x"),
    "join": DOUBLED.replace("EXPRESSION", "[n.x, n.x] | join"),
    "join between": DOUBLED.replace("EXPRESSION", "n.x | join(n.x)"),
    "replace": DOUBLED.replace("EXPRESSION", "n.x | replace('a', 'aaa')"),
    "replace of text": DOUBLED.replace("EXPRESSION", "n.x.replace('', 'a')"),
    "format": DOUBLED.replace("EXPRESSION", "'%s%s' % (n.x, n.x)"),
    "lists": DOUBLED.replace("'ab'", "[1]").replace("EXPRESSION", "n.x + n.x"),
    "lists in lists": DOUBLED.replace("'ab'", "[1]").replace("EXPRESSION", "[n.x, n.x]").replace("length", "tojson"),
    "lists as text": DOUBLED.replace("'ab'", "[1]").replace("EXPRESSION", "[n.x, n.x]").replace("length", "string"),
    "compared lists": DOUBLED.replace("'ab'", "[1]").replace("EXPRESSION", "[n.x, n.x]").replace("n.x | length", "n.x == 1"),
    "blocks": DOUBLED.replace("{% set n.x = EXPRESSION %}", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "center": "{{ 'x' | center(9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "format's width": "{{ '{:9999999999}'.format(1) }}",
    "indent": "{{ messages | tojson(indent=999999999) }}",
    "indented": "{{ ('x\n' * 50000) | indent(999999) }}",
    "slice": THREE + "{{ range(100000) | slice(99999999) | list | length }}{% endfor %}",
    "lipsum": "{{ lipsum(n=99999, min=1000, max=1001) }}",
    "cycler": "{% set c = cycler('') %}" + LOOPS.replace(" %}{% endfor", " %}{{ c.next() }}{% endfor", 1),
    "recursion": "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "a filter by name": "{{ ['x'] | map('center', 9999999999) | list }}",
}  # fmt: skip
# Ended by the clock alone, and soon as well as late. The others come to the bound of memory first.
ENDLESS = (
    *("loops", "loops in a block", "loops in a macro", "macros", "replace", "replace of text", "lists in lists"),
    *("lists as text", "compared lists", "slice", "lipsum", "cycler"),
)
SOON_S = 0.1


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "MAX_RENDER_S", 0.5)
    monkeypatch.setattr(template, "CHEAP_S", 0.1)


@pytest.fixture
def opened() -> Iterator[Any]:
    made: list[ChatTemplate] = []

    def opened(source: str, **options: Any) -> ChatTemplate:
        made.append(ChatTemplate(source, {}, **options))
        return made[-1]

    yield opened
    for one in made:
        one.close()


@pytest.mark.quick("loops", "macros", "replace", "width", "recursion", "lists in lists", "slice", "indent")
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_its_child(name: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile, said = opened(HOSTILE[name], name="chat_template.jinja"), r"template|too long"
    if name in ENDLESS:
        monkeypatch.setattr(apart, "MAX_RENDER_S", SOON_S)
        said = f"took more than {SOON_S:g} s of processor time"
    with pytest.raises(DearError):
        hostile.render(USER, most_s=0.05)
    with pytest.raises(InvalidRequestError, match=said):
        hostile.render(USER)


@pytest.mark.usefixtures("hurried")
def test_what_took_too_long_is_named(opened: Any) -> None:
    said = r"the chat template \(chat_template.jinja\) took more than 0.5 s of processor time for them"
    with pytest.raises(InvalidRequestError, match=said):
        opened(LOOPS, name="chat_template.jinja").render(USER)


@pytest.mark.parametrize(
    "source", [CHAT_TEMPLATE, TOOL_TEMPLATE, (Path(__file__).parents[3] / "demo" / "chat_template.jinja").read_text()]
)
def test_usual_templates_are_cheap(source: str, opened: Any) -> None:
    usual = opened(source)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": [1, {"b": None}]}}}
    messages: list[dict[str, Any]] = [*USER, {"role": "assistant", "content": "y"}, *USER]
    usual.render(messages * 100, most_s=5.0)
    if "tool_calls" in source:
        usual.render([*messages, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=[tool], most_s=5.0)


def test_a_child_renders_the_same(opened: Any) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.content }}{{ m.content | tojson }}<|im_end|>{% endfor %}{{ a.b[0] }}"
    )
    shade = Shade(["<|im_start|>", "<|im_end|>", "<think>"])
    here, there = opened(source, shade=shade), opened(source + "{{ 'x' | center(1) }}", shade=shade)
    messages = [{"role": "user", "content": 'Ö🙂<think>"\ud800'}]
    options: dict[str, Any] = {"variables": {"a": {"b": ["<|im_end|>"]}}, "add_generation_prompt": True}
    assert there.shaded(messages, **options) == here.shaded(messages, **options) + "x"
    assert there.shaded(messages, continue_final_message=True, **options) == here.shaded(
        messages, continue_final_message=True, **options
    )
    with pytest.raises(DearError):
        there.shaded(messages, most_s=1.0, **options)
    for wrong in ({"variables": {"tools": 1}}, {"tools": [{}]}):
        with pytest.raises(InvalidRequestError) as local:
            here.shaded(messages, **wrong)
        with pytest.raises(InvalidRequestError) as remote:
            there.shaded(messages, **wrong)
        assert (remote.value.message, remote.value.param) == (local.value.message, local.value.param)


def test_a_child_that_was_killed_is_started_again(opened: Any) -> None:
    dear = opened("{{ messages[0].content | center(3) }}")
    assert dear.render(USER) == " x "
    os.kill(dear._apart._child._process.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="ask again"):
        dear.render(USER)
    assert dear.render(USER) == " x "


def test_constants_are_not_computed_when_a_template_is_read(opened: Any) -> None:
    for source in (
        "{{ 'x' | center(99999999999) }}",
        "{% set a = 'x' | center(99999999999) %}",
        "{{ 'x' * 99999999999 }}",
    ):
        opened(source)


async def test_a_gateway_serves_beside_a_template_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tokenizer(tmp_path, template="{% if messages[0].content == 'x' %}" + LOOPS + "{% endif %}ok")
    monkeypatch.setattr(apart, "MAX_RENDER_S", 1.5)
    tokenizer = ChatTokenizer(tmp_path)
    try:
        async with run_gateway(tokenizer, HttpSettings()) as gateway:
            slow = asyncio.create_task(asked(gateway, "x"))
            answers = [await asked(gateway, text) for text in ("y", "y" * 1_000)]
            assert [status for status, _ in answers] == [200, 200]
            assert not slow.done()
            status, error = await slow
            assert (status, error["error"]["param"]) == (400, "messages")
            assert "tokenizer_config.json" in error["error"]["message"]
    finally:
        tokenizer.close()


async def asked(gateway: Gateway, content: str) -> tuple[int, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    answer = await gateway.http.post(CHAT, content=json.dumps(body))
    return answer.status_code, answer.json()


async def test_prompts_that_wait_for_a_child_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "MOST_APART", 2)
    room, go_on = Tokenising(), threading.Event()

    def rendered() -> list[int]:
        assert go_on.wait(60)
        return [1]

    waiting = [asyncio.create_task(room._rendered_apart(rendered, MODEL)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="wait for this model's chat template"):
        await room._rendered_apart(rendered, MODEL)
    other = asyncio.create_task(room._rendered_apart(lambda: [2], "another"))
    assert await other == [2]
    go_on.set()
    assert await asyncio.gather(*waiting) == [[1], [1]]
