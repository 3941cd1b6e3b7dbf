"""Earlier answers: bounded, first in, first out, and never another domain's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.drafts import answers
from decode.drafts.settings import LookupSettings
from decode.drafts.suffix import Lookup
from tests.unit.decode.drafts.lookups import sequence_of

ROOTS = [bytes([number]) * 16 for number in range(3)]


def test_an_answer_is_drafted_from_when_it_is_complete() -> None:
    lookup = Lookup(LookupSettings())
    earlier = sequence_of([1, 2, 3, 4, *range(50, 70)], prompt=4)
    later = sequence_of([9, 50, 51, 52], prompt=1)
    lookup.draft(earlier, 8)
    assert lookup.draft(later, 8) == []
    lookup.ended(earlier)
    assert lookup.draft(later, 8) == [53, 54, 55]
    assert lookup.match_length(later) == 3


def test_the_first_tokens_of_an_answer_are_found_by_the_prompts_end() -> None:
    lookup = Lookup(LookupSettings())
    lookup.ended(sequence_of([1, 2, 3, 4, *range(50, 70)], prompt=4))
    assert lookup.draft(sequence_of([7, 2, 3, 4]), 8) == [50, 51, 52]


def test_n_gram_lookup_keeps_no_answers() -> None:
    lookup = Lookup(LookupSettings.ngram())
    lookup.ended(sequence_of([*range(100)], prompt=10))
    assert lookup.draft(sequence_of([50, 51, 52, 53]), 8) == []


def test_the_longer_match_wins_and_equal_ones_count_together() -> None:
    lookup = Lookup(LookupSettings())
    for _ in range(2):
        lookup.ended(sequence_of([0, 5, 6, 7, 20], prompt=1))
    own_is_rarer = sequence_of([5, 6, 7, 30, 5, 6, 7])
    own_is_longer = sequence_of([4, 5, 6, 7, 30, 4, 5, 6, 7])
    assert lookup.draft(own_is_rarer, 1) == [20]
    assert lookup.draft(own_is_longer, 1) == [30]


@given(
    texts=st.lists(st.tuples(st.sampled_from(ROOTS), st.lists(st.integers(0, 3), min_size=1, max_size=30)), max_size=12)
)
def test_a_draft_is_a_continuation_in_the_sequences_own_domain(texts: list[tuple[bytes, list[int]]]) -> None:
    lookup = Lookup(LookupSettings())
    ended: dict[bytes, list[list[int]]] = {root: [] for root in ROOTS}
    for root, text in texts:
        sequence = sequence_of(text, prompt=1, root=root)
        draft = lookup.draft(sequence, 8)
        known = [*ended[root], text]
        length = lookup.match_length(sequence)
        assert not draft or any(_occurs([*text[-length:], *draft], one) for one in known)
        assert length == max(_longest_match(text, one) for one in known)
        lookup.ended(sequence)
        if len(text) > 1:
            ended[root].append(text)


def _occurs(run: list[int], text: list[int]) -> bool:
    return any(text[start : start + len(run)] == run for start in range(len(text)))


def _longest_match(text: list[int], other: list[int]) -> int:
    """As far as a token follows."""
    return max((n for n in range(3, min(24, len(text)) + 1) if _occurs(text[-n:], other[:-1])), default=0)


def test_the_newest_answers_stay_and_their_number_is_bounded() -> None:
    settings = LookupSettings(answer_tokens=400)
    lookup = Lookup(settings)
    texts = [[1000 * number + index for index in range(30)] for number in range(100)]
    for number, text in enumerate(texts):
        lookup.ended(sequence_of([0, *text], prompt=0))
        (index,) = lookup._answers.of(bytes(16))
        assert len(index) <= settings.answer_tokens
        kept = [bool(lookup.draft(sequence_of(one[:10]), 4)) for one in texts[: number + 1]]
        assert sum(kept) >= min(number + 1, settings.answer_tokens // 2 // 32)
        assert kept == sorted(kept), "the oldest go first"


def test_the_domain_used_least_recently_gives_way() -> None:
    lookup = Lookup(LookupSettings(domains=2))
    for root in ROOTS[:2]:
        lookup.ended(sequence_of([*range(20)], prompt=1, root=root))
    lookup.draft(sequence_of([3, 4, 5], root=ROOTS[0]), 4)
    lookup.ended(sequence_of([*range(20)], prompt=1, root=ROOTS[2]))
    drafts = [lookup.draft(sequence_of([3, 4, 5], root=root), 4) for root in ROOTS]
    assert [bool(draft) for draft in drafts] == [True, False, True]


def test_a_long_answer_is_indexed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PIECE", 50)
    lookup = Lookup(LookupSettings())
    text = random.Random(4).sample(range(10_000), 300)
    lookup.ended(sequence_of(text, prompt=0))
    late = sequence_of(text[270:275])
    drafts = [lookup.draft(late, 3) for _ in range(6)]
    assert drafts == [[]] * 4 + [text[275:278]] * 2
