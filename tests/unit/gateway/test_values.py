"""How many values JSON text has, counted without parsing it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from gateway.dialects.openai.schema import ChatRequest, CompletionRequest
from gateway.http import fields
from gateway.http.fields import MAX_TOKEN_IDS, MAX_VALUES, TextsLeft, Values, parse_body
from gateway.routes.text import DetokenizeRequest
from tests.examples import examples

_text = st.text(st.sampled_from('a",[{\\]}:\n Ö🙂'), max_size=12)
_json = st.recursive(
    st.none() | st.integers() | _text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_text, inner, max_size=5),
    max_leaves=30,
)


def values_in(value: Any) -> Values:
    """Counted the slow way."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    found = [values_in(one) for one in inner]
    own = int(isinstance(value, dict | list))
    return Values(max(0, len(inner) - 1) + sum(one.commas for one in found), own + sum(one.containers for one in found))


@examples(120)
@given(value=_json, is_ascii=st.booleans(), size=st.sampled_from([1, 2, 3, 7, 1 << 16]))
def test_what_is_in_strings_does_not_count(value: Any, is_ascii: bool, size: int) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fields, "SLICE_BYTES", size)
        assert Values.counted(text) == values_in(value)
    assert Values.signs_in(text).total >= Values.counted(text).total


@pytest.mark.parametrize("run", range(6))
def test_a_run_of_backslashes_may_be_cut_anywhere(run: int) -> None:
    text = json.dumps(["\\" * run + '"[,', "\\" * run]).encode()
    for size in range(1, len(text)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(fields, "SLICE_BYTES", size)
            assert Values.counted(text) == Values(commas=1, containers=1)


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "a", "messages": [{"role": "user", "content": "x"}], **more}).encode()


def test_a_bound_is_where_it_is_said_to_be() -> None:
    of_the_rest = Values.counted(chat(chat_template_kwargs={"a": []})).total
    most = {"a": [1] * (MAX_VALUES - of_the_rest + 1)}
    assert parse_body(chat(chat_template_kwargs=most), ChatRequest).chat_template_kwargs == most
    with pytest.raises(
        InvalidRequestError, match=f"^chat_template_kwargs: has more than {MAX_VALUES} values"
    ) as refused:
        parse_body(chat(chat_template_kwargs={"a": most["a"] + [1]}), ChatRequest)
    assert refused.value.param == "chat_template_kwargs"


def test_signs_within_a_text_are_text() -> None:
    text = "[{,}] " * MAX_VALUES
    assert (
        parse_body(chat(user=None, messages=[{"role": "user", "content": text}]), ChatRequest).messages[0].content
        == text
    )


def test_a_prompt_may_have_more_numbers_than_other_fields() -> None:
    prompt = [7] * (MAX_VALUES + 100)
    assert parse_body(json.dumps({"model": "a", "prompt": prompt}).encode(), CompletionRequest).prompts == [prompt]
    with pytest.raises(InvalidRequestError, match=f"^prompt: has more than {MAX_TOKEN_IDS} entries"):
        parse_body(b'{"model":"a","prompt":[' + b"1," * (MAX_TOKEN_IDS + 1) + b"1]}", CompletionRequest)


LONG = [*range(100, 40_000)]  # read slice by slice


@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n ", " : ")])
def test_long_lists_of_token_ids_are_what_was_sent(separators: tuple[str, str]) -> None:
    body = json.dumps({"model": "a", "prompt": LONG, "user": "[1,2]"}, separators=separators).encode()
    parsed = parse_body(body, CompletionRequest)
    assert (parsed.prompts, parsed.model, parsed.user) == ([LONG], "a", "[1,2]")
    assert parse_body(json.dumps({"tokens": LONG}, separators=separators).encode(), DetokenizeRequest).tokens == LONG
    text = json.dumps(LONG)[1:-1]
    assert parse_body(json.dumps({"model": "a", "prompt": text}).encode(), CompletionRequest).prompts == [text]
    for lists in ([LONG], [LONG, [7], LONG]):
        body = json.dumps({"model": "a", "prompt": lists}, separators=separators).encode()
        assert parse_body(body, CompletionRequest).prompts == lists


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.0, True, None, "a", [1]])
def test_a_wrong_entry_of_a_long_list_is_told_as_in_a_short_one(wrong: Any) -> None:
    for ids in ([wrong], [*LONG, wrong]):
        with pytest.raises(InvalidRequestError, match=f"^tokens.{len(ids) - 1}: Input should be ") as refused:
            parse_body(json.dumps({"tokens": ids}).encode(), DetokenizeRequest)
        assert refused.value.param == "tokens"


@pytest.mark.parametrize("wrong", [[-1], [2**32], [True], [[1]], [], 1, "a", None])
def test_a_wrong_list_among_long_ones_is_told_as_among_short_ones(wrong: Any) -> None:
    told = []
    for ids in ([1], LONG):
        with pytest.raises(InvalidRequestError) as refused:
            parse_body(json.dumps({"model": "a", "prompt": [ids, wrong, ids]}).encode(), CompletionRequest)
        told.append((str(refused.value), refused.value.param))
    assert told[0] == told[1]
    assert told[0][1] == "prompt"


@pytest.mark.parametrize("more", [64, 2000])
def test_more_lists_of_ids_than_prompts_are_refused(more: int) -> None:
    with pytest.raises(InvalidRequestError, match="at most 64 prompts"):
        parse_body(json.dumps({"model": "a", "prompt": [LONG] + [[1]] * more}).encode(), CompletionRequest)


def test_a_field_that_is_there_twice_counts_twice() -> None:
    half = json.dumps([1] * (MAX_VALUES * 2 // 3))
    body = f'{{"model":"a","messages":[],"metadata":{half},"metadata":{half}}}'.encode()
    with pytest.raises(InvalidRequestError, match="metadata: has more than"):
        parse_body(body, ChatRequest)


def test_the_json_in_all_strings_of_a_body_has_one_bound() -> None:
    left = TextsLeft(100)
    left.take(json.dumps([[]] * 20))
    left.take(json.dumps("[{,}]" * 100))
    with pytest.raises(ValueError, match="JSON in strings has more than"):
        left.take(json.dumps([[]] * 20))
