"""Tokens to text and stop strings: pieces joined are the whole, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer
from gateway.stop import StopMatcher
from gateway.tokenizer import ChatTokenizer
from tests.models import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return ChatTokenizer(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_pieces_joined_are_the_text(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=40))
def test_any_tokens_joined_are_their_decoding(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    joined = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert joined.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_half_a_character_waits_for_its_other_half(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("né€🙂", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert all("\ufffd" not in detokenizer.push([token_id]) for token_id in ids)
    assert detokenizer.flush() == ""


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_are_found_as_in_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    out = ""
    for index, piece in enumerate(pieces):
        out += matcher.push(piece)
        if matcher.matched is not None:
            seen = "".join(pieces[: index + 1])
            break
    else:
        out += matcher.flush()
        assert out == "".join(pieces)
        assert not any(stop in out for stop in stops)
        return
    earlier = "".join(pieces[:index])
    assert not any(stop in earlier for stop in stops)
    start = min(seen.index(stop) for stop in stops if stop in seen)
    assert out == (seen[: start + len(matcher.matched)] if include else seen[:start])


def test_text_is_withheld_only_while_it_could_begin_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("abc E", "N", "d", " x")] == ["abc ", "", "ENd", " x"]
