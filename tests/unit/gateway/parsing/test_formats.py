"""Every format: the same message however the tokens are cut, with arguments that are JSON."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsing.choose import CALLS, REASONINGS, Parsers, choose
from tests.examples import examples
from tests.unit.gateway.parsing.cases import CASES, CITY, Case
from tests.unit.gateway.parsing.formats import parse, pieces_of, said_of


def bound_of(case: Case) -> Any:
    return choose("", case.vocabulary, parsers=Parsers(case.calls, case.reasoning))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [None, [1], [3], [7, 2]], ids=["whole", "1", "3", "7, 2"])
def test_an_answer_is_the_same_message_however_it_is_cut(name: str, cuts: list[int] | None) -> None:
    case = CASES[name]
    parsed = parse(bound_of(case), case.text, case.vocabulary, cuts=cuts, prompt=case.prompt)
    assert said_of(parsed) == case.said


@pytest.mark.parametrize("name", CASES)
def test_a_cut_at_any_place_gives_the_same_message(name: str) -> None:
    case, bound = CASES[name], bound_of(CASES[name])
    for at in range(1, len(case.text)):
        parsed = parse(bound, case.text, case.vocabulary, cuts=[at, 1 << 30], prompt=case.prompt)
        assert said_of(parsed) == case.said, at


@examples(25)
@given(name=st.sampled_from(sorted(CASES)), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_cuts_give_the_same_message(name: str, cuts: list[int]) -> None:
    case = CASES[name]
    parsed = parse(bound_of(case), case.text, case.vocabulary, cuts=cuts, prompt=case.prompt)
    assert said_of(parsed) == case.said


@examples(60)
@given(
    name=st.sampled_from(sorted(CASES)), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12), end=st.integers(0, 200),
    junk=st.text(alphabet='<>{}[]"\\:, \nabt_/|=', max_size=12),
)  # fmt: skip
def test_broken_answers_are_the_same_however_they_are_cut(name: str, cuts: list[int], end: int, junk: str) -> None:
    case = CASES[name]
    text = case.text[:end] + junk + case.text[end + len(junk) :]
    at_once, cut = (
        parse(bound_of(case), text, case.vocabulary, cuts=sizes, prompt=case.prompt) for sizes in (None, cuts)
    )
    assert (at_once.content, at_once.reasoning) == (cut.content, cut.reasoning)
    assert [(one.name, one.arguments) for one in at_once.calls] == [(one.name, one.arguments) for one in cut.calls]


@examples(120)
@given(
    name=st.sampled_from(sorted(CASES)), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12), at=st.integers(0, 200),
    junk=st.text(alphabet='<>{}[]"\\:, \nabt_/|=', max_size=12), tools=st.booleans(), begins=st.booleans(),
)  # fmt: skip
def test_what_is_plain_need_not_be_parsed(
    name: str, cuts: list[int], at: int, junk: str, *, tools: bool, begins: bool
) -> None:
    case = CASES[name]
    text = case.text[:at] + junk + case.text[at:]
    prompt = (case.prompt or "assistant\n") + ("<think>\n" if begins else "")
    read, told = (
        parse(bound_of(case), text, case.vocabulary, cuts=cuts, prompt=prompt, tools=tools, plainly=plainly)
        for plainly in (False, True)
    )
    assert (told.content, told.reasoning) == (read.content, read.reasoning)
    assert [(one.name, one.arguments) for one in told.calls] == [(one.name, one.arguments) for one in read.calls]


@examples(120)
@given(
    name=st.sampled_from(sorted(CASES)), at=st.integers(0, 200), end=st.integers(1, 200), is_whole=st.booleans(),
    junk=st.text(alphabet='<>{}[]"\\:, \nabt_/|=', max_size=6),
)  # fmt: skip
def test_nothing_of_a_message_that_is_continued_is_said_again(
    name: str, at: int, end: int, is_whole: bool, junk: str
) -> None:
    """Whatever its end may have begun, and whatever the rest makes of it: what is said is of the answer."""
    case = CASES[name]
    pieces = pieces_of(case.text, case.vocabulary)
    texts = {index: mark for mark, index in case.vocabulary.items()}
    begun, answer = ("".join(texts.get(one, one) for one in part) for part in (pieces[:at], pieces[at : at + end]))
    turn = case.prompt or "assistant\n"
    parsed = parse(bound_of(case), answer + junk, case.vocabulary, cuts=[3], prompt=turn + begun, is_whole=is_whole)
    assert len(parsed.content) + len(parsed.reasoning) <= len(answer + junk)


@pytest.mark.parametrize("name", ["llama3_json, JSON that is an answer", "pythonic, a list that is an answer"])
def test_what_began_like_a_call_and_is_none_goes_on_where_it_was(name: str) -> None:
    case = CASES[name]
    for at in range(1, len(case.text)):
        begun, rest = case.text[:at], case.text[at:]
        parsed = parse(bound_of(case), rest, case.vocabulary, prompt="assistant\n" + begun)
        assert (parsed.content.strip(), parsed.calls) == (rest.strip(), [])


def test_every_format_has_a_case() -> None:
    assert {case.calls for case in CASES.values()} == {*CALLS, "none"}
    assert {case.reasoning for case in CASES.values()} >= {*REASONINGS}


def test_arguments_come_in_pieces() -> None:
    case = CASES["hermes"]
    parsed = parse(bound_of(case), case.text, case.vocabulary, cuts=[4])
    assert parsed.calls[0].arguments == '{"city": "Zürich", "days": 3}'


def test_without_tools_markup_is_content() -> None:
    case = CASES["hermes, without tokens for its tags"]
    assert parse(bound_of(case), case.text, case.vocabulary, tools=False).content == case.text


def test_one_call_where_only_one_is_wanted() -> None:
    case = CASES["glm"]
    assert said_of(parse(bound_of(case), case.text, case.vocabulary, parallel=False)).calls == [("weather", CITY)]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "kimi_k2"])
def test_a_call_that_was_cut_is_not_made_whole(name: str) -> None:
    case = CASES[name]
    end = case.text.index("3" if name != "qwen3_coder" else "12")
    parsed = parse(bound_of(case), case.text[:end], case.vocabulary, is_whole=False)
    assert parsed.calls[0].name == "weather"
    with pytest.raises(ValueError):
        said_of(parsed)


@pytest.mark.parametrize(
    ("prompt", "text", "content"),
    [
        ("if a <", " b then", " b then"),
        ("so <tool", "s> and <tool", "s> and <tool"),
    ],
)
def test_what_a_prompt_s_end_held_back_is_not_said_again(prompt: str, text: str, content: str) -> None:
    for cuts in (None, [1]):
        parsed = parse(choose("", {}, parsers=Parsers("qwen3_coder", "none")), text, {}, prompt=prompt, cuts=cuts)
        assert (parsed.content, parsed.calls) == (content, [])


def test_a_call_that_a_prompt_opened_is_the_first() -> None:
    format_ = choose("", {}, parsers=Parsers("hermes", "none"))
    prompt = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    parsed = parse(format_, 'me"}}\n</tool_call>', {}, prompt=prompt)
    assert [(call.index, call.name, call.arguments) for call in parsed.calls] == [(0, "weather", 'me"}')]
    assert parsed.calls[0].id
    late = parse(
        format_,
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        {},
        prompt=prompt + 'me"}}\n</tool_call>',
    )
    assert said_of(late).calls == [("now", {})]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"\\ud83d\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a\\ud83d", "id": "\\udc00", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=tags>\n[\"\\ud83d\"]\n</parameter>\n</function>\n</tool_call>"),
        ("pythonic", '[weather(city="\\ud83d")]'),
    ],
)  # fmt: skip
def test_half_a_character_in_a_call_can_be_sent(calls: str, text: str) -> None:
    parsed = parse(choose("", {}, parsers=Parsers(calls, "none")), text, {})
    assert len(parsed.calls) == 1
    call = parsed.calls[0]
    assert "\N{REPLACEMENT CHARACTER}" in f"{call.id}{call.name}{call.arguments}".encode().decode()
