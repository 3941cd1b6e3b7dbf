"""Drafts from a sequence's own tokens are what followed where its end occurred before."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.drafts import own
from decode.drafts.drafters import DRAFTERS
from decode.drafts.occurrences import MOST_FOUND, MOST_VISITED
from decode.drafts.settings import LookupSettings, MatchLengths
from decode.drafts.suffix import Lookup
from tests.unit.decode.drafts.lookups import occurrences, sequence_of

TEXTS = st.lists(st.integers(0, 3), max_size=MOST_VISITED - 1)


def by_brute_force(text: list[int], most: int, settings: LookupSettings) -> list[int]:
    length, places = occurrences(text, text, least=settings.lengths.least, most=settings.lengths.most)
    draft: list[int] = []
    probability = 1.0
    places = places[:MOST_FOUND]
    while len(draft) < min(most, int(length * settings.factor)):
        next_ones = [text[place + len(draft)] for place in places if place + len(draft) < len(text)]
        if not next_ones:
            break
        token = Counter(next_ones).most_common(1)[0][0]  # of equally frequent ones, the first seen
        probability *= next_ones.count(token) / len(next_ones)
        if probability < settings.min_probability:
            break
        places = [place for place in places if text[place + len(draft) : place + len(draft) + 1] == [token]]
        draft.append(token)
    return draft


SETTINGS = st.builds(
    lambda least, more, factor, probability: LookupSettings(
        lengths=MatchLengths(least, least + more), factor=factor, min_probability=probability
    ),
    st.integers(1, 4),
    st.integers(0, 20),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]),
)


@given(text=TEXTS, most=st.integers(0, 12), settings=SETTINGS)
def test_a_draft_is_the_likeliest_continuation_of_the_longest_match(
    text: list[int], most: int, settings: LookupSettings
) -> None:
    lookup, sequence = Lookup(settings), sequence_of(text)
    draft = lookup.draft(sequence, most)
    assert draft == by_brute_force(text, most, settings)
    length, places = occurrences(text, text, least=settings.lengths.least, most=settings.lengths.most)
    assert len(draft) <= min(most, length * settings.factor)
    assert not draft or any(text[place : place + len(draft)] == draft for place in places)
    assert not draft or lookup.match_length(sequence) == length


@given(text=TEXTS, prompt=st.integers(0, 60), steps=st.lists(st.integers(1, 20)))
def test_a_draft_depends_on_the_text_alone_and_not_on_when_it_grew(
    text: list[int], prompt: int, steps: list[int]
) -> None:
    settings = LookupSettings()
    lookup, sequence = Lookup(settings), sequence_of(text[:prompt])
    for step in steps:
        known = len(sequence.token_ids)
        sequence.token_ids.extend(text[known : known + step])
        assert lookup.draft(sequence, 8) == Lookup(settings).draft(sequence_of(sequence.token_ids), 8)


def test_a_long_prompt_is_indexed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "SLICE", 100)
    text = random.Random(3).sample(range(10_000), 1000)
    late, early = sequence_of([*text, *text[500:510]]), sequence_of([*text, *text[20:30]])
    lookup = Lookup(LookupSettings())
    drafts = [lookup.draft(late, 4) for _ in range(12)]
    assert drafts.index(text[510:514]) == 5
    assert drafts[:5] == [[]] * 5
    assert lookup.draft(early, 4) == text[30:34]


def test_nothing_is_kept_of_a_sequence_that_is_gone() -> None:
    lookup = Lookup(LookupSettings())
    one, other = sequence_of([1, 2, 3]), sequence_of([4, 5, 6])
    lookup.draft(one, 1)
    lookup.draft(other, 1)
    lookup.ended(one)
    del other
    assert len(lookup._own) == 0
    assert lookup.match_length(one) == 0


def test_n_gram_lookup_drafts_as_much_as_it_may() -> None:
    lookup = DRAFTERS["ngram"](LookupSettings.ngram(prompt_lookup_min=2, prompt_lookup_max=4))
    assert lookup.draft(sequence_of([*range(20), 3, 4]), 10) == [*range(5, 15)]
    assert lookup.draft(sequence_of([*range(20), 4]), 10) == []


def test_matches_have_at_least_a_token_and_no_more_than_are_compared() -> None:
    for wrong in ((0, 3), (4, 3)):
        with pytest.raises(ValueError):
            MatchLengths(*wrong)
