"""The index finds what a search through the whole text finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode.drafts.occurrences import MOST_FOUND, MOST_VISITED, Found, Occurrences
from decode.drafts.settings import MatchLengths
from tests.unit.decode.drafts.lookups import occurrences

TEXTS = st.lists(st.integers(0, 3), max_size=MOST_VISITED - 1)
LENGTHS = st.builds(lambda least, more: MatchLengths(least, least + more), st.integers(1, 10), st.integers(0, 20))


def index_of(pieces: list[list[int]], lengths: MatchLengths, *, capacity: int = 64) -> Occurrences:
    index = Occurrences(lengths, capacity=capacity)
    for piece in pieces:
        index.extend(piece)
    return index


@given(text=TEXTS, lengths=LENGTHS, capacity=st.sampled_from([1, 64, 5000]))
def test_a_text_finds_its_own_end(text: list[int], lengths: MatchLengths, capacity: int) -> None:
    index = index_of([text], lengths, capacity=capacity)
    length, places = occurrences(text, text, least=lengths.least, most=lengths.most)
    found = index.longest(index.suffix(text))
    assert found.places == places[:MOST_FOUND]
    assert found.length == length or not places


@given(text=TEXTS, other=TEXTS, lengths=LENGTHS)
def test_a_text_finds_the_end_of_another(text: list[int], other: list[int], lengths: MatchLengths) -> None:
    index = index_of([text], lengths)
    length, places = occurrences(text, other, least=lengths.least, most=lengths.most)
    assert index.longest(index.suffix(other)) == (Found(length, places[:MOST_FOUND]) if places else Found(0, []))


@given(pieces=st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=8), lengths=LENGTHS)
def test_it_does_not_matter_in_which_pieces_a_text_comes(pieces: list[list[int]], lengths: MatchLengths) -> None:
    text = [token for piece in pieces for token in piece]
    in_pieces, one_by_one = index_of(pieces, lengths), index_of([[token] for token in text], lengths)
    for end in range(len(text) + 1):
        suffix = in_pieces.suffix(text[:end])
        assert in_pieces.longest(suffix) == one_by_one.longest(suffix)


@given(first=TEXTS, second=TEXTS, lengths=LENGTHS)
def test_no_match_and_no_continuation_goes_over_the_end_of_a_text(
    first: list[int], second: list[int], lengths: MatchLengths
) -> None:
    index = Occurrences(lengths, capacity=64)
    index.extend(first)
    index.end()
    index.extend(second)
    for suffix in (first, second, first + second):
        for place in (found := index.longest(index.suffix(suffix))).places:
            within = first if place < len(first) else second
            start = place if within is first else place - len(first) - 1
            assert found.length <= start < len(within)
            assert within[start - found.length : start] == suffix[-found.length :]


def test_a_frequent_match_is_sought_among_the_newest() -> None:
    index = index_of([[1, 2, 3, 9, *([1, 2, 3, 4] * MOST_VISITED), 9, 1, 2, 3]], MatchLengths(3, 3))
    found = index.longest(index.suffix([1, 2, 3]))
    newest = len(index) - 4
    assert found == Found(3, [newest - 1 - 4 * back for back in range(MOST_FOUND)])


def test_a_long_match_is_found_behind_many_short_ones() -> None:
    long = list(range(100, 112))
    text = [*long, 7, *([50, *long[-3:]] * MOST_VISITED * 2)]
    index = index_of([text], MatchLengths(3, 24))
    assert index.longest(index.suffix(long)) == Found(12, [12])
