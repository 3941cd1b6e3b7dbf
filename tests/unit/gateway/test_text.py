"""Tokens to text and stop strings: pieces joined are the whole, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answers import detokenizer
from gateway.answers.detokenizer import Detokenizer, StopMatcher
from gateway.answers.tokenizer import ChatTokenizer
from tests.examples import examples


@examples(80)
@given(text=st.text(max_size=60))
def test_pieces_joined_are_the_text(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


@examples(80)
@given(text=st.text(max_size=60) | st.text(alphabet="the wüé🙂 ", max_size=60), size=st.integers(1, 4))
def test_pieces_joined_are_the_text_with_prefix_spaces(
    prefix_space_tokenizer: ChatTokenizer, text: str, size: int
) -> None:
    ids = prefix_space_tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(prefix_space_tokenizer)
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == prefix_space_tokenizer.decode(ids, skip_special_tokens=True)


@examples(120)
@given(ids=st.lists(st.integers(0, 511), max_size=40), skip=st.booleans())
def test_any_tokens_joined_are_their_decoding(tokenizer: ChatTokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    joined = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens_joined_are_the_text(tokenizer: ChatTokenizer, prefix_space_tokenizer: ChatTokenizer) -> None:
    for one in (tokenizer, prefix_space_tokenizer):
        ids = one.encode("the Größe 🙂", add_special_tokens=False)
        assert b"".join(map(one.token_bytes, ids)).decode().strip() == "the Größe 🙂"
        assert one.token_bytes(one.tokenizer.get_vocab_size() + 7) == b""


def test_half_a_character_waits_for_its_other_half(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("né€🙂", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert all("\ufffd" not in detokenizer.push([token_id]) for token_id in ids)
    assert detokenizer.flush() == ""


def _first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first complete stop string ends, and the longest that ends there."""
    for end in range(len(text) + 1):
        found = [one for one in stops if text[:end].endswith(one)]
        if found:
            return end, max(found, key=len)
    return None


@examples(200)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
def test_stop_strings_are_found_as_in_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    out = seen = ""
    for piece in pieces:
        out, seen = out + matcher.push(piece), seen + piece
        found = _first_stop(seen, stops)
        if found is not None:
            end, first = found
            assert matcher.matched == first
            assert out == seen[: end if include else end - len(first)]
            assert matcher.push("abc") + matcher.flush() == ""
            return
        begun = (size for size in range(len(seen), 0, -1) if any(one.startswith(seen[-size:]) for one in stops))
        assert out == seen[: len(seen) - next(begun, 0)]
    assert matcher.matched is None
    assert out + matcher.flush() == "".join(pieces)


def test_long_near_matches_are_followed_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = ["a" * 999 + "b", *(chr(ord("c") + index) + "a" * 999 for index in range(15))]
    steps = 0
    made = detokenizer._State._made

    def counted(state: detokenizer._State, character: str) -> detokenizer._State | None:
        nonlocal steps
        steps += 1
        return made(state, character)

    monkeypatch.setattr(detokenizer._State, "_made", counted)
    matcher = StopMatcher(stops)
    text = "a" * 5_000 + "c" + "a" * 998 + "x" + "a" * 999
    out = "".join(matcher.push(text[start : start + 4]) for start in range(0, len(text), 4))
    assert out == text[:-999]
    assert steps < 2 * len(text)
    assert matcher.push("b!") == ""
    assert matcher.matched == stops[0]


def test_text_is_withheld_only_while_it_could_begin_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("abc E", "N", "d", " x")] == ["abc ", "", "ENd", " x"]
