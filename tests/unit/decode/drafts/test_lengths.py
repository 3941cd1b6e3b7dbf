"""The tokens that a pass verifies: the best for the whole pass, none when none pays, fewer after misses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.drafts.acceptance import Acceptance
from decode.drafts.history import LONGEST_PAUSE, LONGEST_UNPAID, MOST_MISSES, MOST_UNPAID, SHORTEST_PAUSE, History
from decode.drafts.lengths import REMEMBERED, STARTS_AT, STOPS_AT, Candidate, DraftLengths
from engine.sequence import Sequence
from tests.unit.decode.drafts.lookups import sequence_of

COSTS = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]), min_size=64, max_size=64)
DRAFTS = st.lists(st.tuples(st.integers(0, 4), st.integers(3, 24)), min_size=1, max_size=3)


def grown(increments: list[float]) -> Callable[[int], float]:
    """Milliseconds that never fall with rows."""
    times = list(itertools.accumulate(increments, initial=1.0))
    return lambda rows: times[rows]


def candidates_of(drafts: list[tuple[int, int]]) -> list[Candidate]:
    return [Candidate(sequence_of([1, 2, 3], prompt=1), length, match) for length, match in drafts]


def flat(rows: int) -> float:
    return 5.0


def steep(rows: int) -> float:
    return 5.0 * rows


@given(drafts=DRAFTS, costs=COSTS, more=st.integers(0, 8), room=st.integers(0, 12), sync=st.sampled_from([0.0, 0.3]))
def test_no_other_lengths_bring_more_tokens_a_millisecond(
    drafts: list[tuple[int, int]], costs: list[float], more: int, room: int, sync: float
) -> None:
    """`more`: sequences without a draft; each acceptance is the usual one for its match."""
    rows, step_ms, usual = len(drafts) + more, grown(costs), Acceptance()

    def rate(lengths: tuple[int, ...]) -> float:
        expected = sum(
            usual.of(match) ** place
            for (_, match), length in zip(drafts, lengths, strict=True)
            for place in range(1, length + 1)
        )
        drafted = sum(lengths)
        return (rows + expected) / (step_ms(rows + drafted) + (sync if drafted else 0.0))

    every = itertools.product(*(range(length + 1) for length, _ in drafts))
    best = max(rate(lengths) for lengths in every if sum(lengths) <= room)
    chosen = tuple(
        DraftLengths(more_ms=lambda _: sync).choose(
            candidates_of(drafts), rows=rows, most_rows=rows + room, step_ms=step_ms
        )
    )
    assert sum(chosen) <= room
    assert all(length <= most for length, (most, _) in zip(chosen, drafts, strict=True))
    none = rate((0,) * len(drafts))
    if best > none * STARTS_AT * (1 + 1e-9):
        assert math.isclose(rate(chosen), best)
    elif best < none * STARTS_AT * (1 - 1e-9):
        assert not any(chosen)


def test_a_prompts_rows_are_no_tokens() -> None:
    """With 500 rows of a prompt in the pass, two rows more cost nothing that counts."""
    candidates = candidates_of([(2, 24)])
    choose = DraftLengths().choose
    assert choose(candidates, rows=501, most_rows=600, step_ms=float, decoding=1) == [2]
    assert choose(candidates, rows=1, most_rows=600, step_ms=float) == [0]


def test_no_draft_has_no_length() -> None:
    assert DraftLengths().choose([], rows=4, most_rows=8, step_ms=flat) == []
    assert DraftLengths().choose(candidates_of([(0, 0)]), rows=1, most_rows=8, step_ms=flat) == [0]
    assert DraftLengths().choose(candidates_of([(4, 9)]), rows=9, most_rows=8, step_ms=flat) == [0]


def test_what_a_sequence_accepts_decides_what_is_verified_of_it() -> None:
    lengths = DraftLengths()
    good, bad = candidates_of([(8, 6), (8, 6)])
    for _ in range(6):
        for candidate, accepted in ((good, 8), (bad, 1)):
            lengths.choose([candidate], rows=1, most_rows=9, step_ms=flat)
            lengths.verified(candidate.sequence, 8, accepted)
    shares = lengths.choose([good, bad], rows=2, most_rows=10, step_ms=flat)
    assert shares[0] > shares[1]
    assert sum(shares) == 8


def test_the_usual_acceptance_is_learnt_from_other_sequences() -> None:
    lengths = DraftLengths()

    def step_ms(rows: int) -> float:
        return 5.0 if rows == 1 else 6.0

    def choice() -> list[int]:
        return lengths.choose(candidates_of([(3, 3)]), rows=1, most_rows=4, step_ms=step_ms)

    assert choice() == [3]
    for candidate in candidates_of([(3, 3)] * 20):
        lengths.choose([candidate], rows=1, most_rows=4, step_ms=flat)
        lengths.verified(candidate.sequence, 3, 0)
    assert choice() == [0]


def miss(lengths: DraftLengths, sequence: Sequence) -> int:
    """Let a draft fail; returns for how many tokens the sequence pauses."""
    lengths.choose([Candidate(sequence, 3, 3)], rows=1, most_rows=4, step_ms=flat)
    sequence.token_ids.append(1)
    lengths.verified(sequence, 3, 0)
    pause = 0
    while not lengths.may_draft(sequence):
        sequence.token_ids.append(1)
        pause += 1
    return pause


@pytest.mark.parametrize(("usual", "misses"), [(0.99, 2), (0.9, 2), (0.7, 4), (0.5, 6), (0.1, MOST_MISSES)])
def test_a_pause_waits_for_more_misses_where_they_are_usual(usual: float, misses: int) -> None:
    history = History()
    pauses = [history.verified(usual=usual, tried=1, accepted=0) for _ in range(misses)]
    assert pauses == [0] * (misses - 1) + [SHORTEST_PAUSE]


def test_pauses_grow_with_misses_in_a_row_and_are_bounded() -> None:
    lengths, sequence = DraftLengths(), sequence_of([1, 2, 3], prompt=1)
    pauses = [miss(lengths, sequence) for _ in range(18)]
    assert pauses[: MOST_MISSES + 2] == [0] * (MOST_MISSES - 1) + [SHORTEST_PAUSE << doubled for doubled in range(3)]
    assert pauses[-1] == max(pauses) == LONGEST_PAUSE
    lengths.verified(sequence, 3, 1)
    assert miss(lengths, sequence) == 0


def test_a_sequence_whose_drafts_do_not_pay_pauses() -> None:
    """Its lookups cost time, too."""
    lengths, sequence = DraftLengths(), sequence_of([1, 2, 3], prompt=1)
    pauses = list[int]()
    for _ in range(400):
        if lengths.may_draft(sequence):
            assert lengths.choose([Candidate(sequence, 3, 3)], rows=9, most_rows=99, step_ms=steep) == [0]
            pauses.append(0)
        else:
            pauses[-1] += 1
        sequence.token_ids.append(1)
    assert pauses[: MOST_UNPAID - 1] == [0] * (MOST_UNPAID - 1)
    assert max(pauses) < LONGEST_UNPAID == pauses[-2] + 1
    assert lengths.choose([Candidate(sequence, 3, 3)], rows=1, most_rows=99, step_ms=flat) == [3]


def test_a_batch_stops_drafting_at_a_smaller_gain_than_it_begins_at() -> None:
    usual = Acceptance().of(3)
    gain = (STARTS_AT + STOPS_AT) / 2

    def step_ms(rows: int) -> float:
        return 1.0 if rows == 1 else (1 + usual) / gain

    lengths, candidates = DraftLengths(), candidates_of([(1, 3)])
    assert lengths.choose(candidates, rows=1, most_rows=2, step_ms=step_ms) == [0]
    assert lengths.choose(candidates, rows=1, most_rows=2, step_ms=flat) == [1]
    assert lengths.choose(candidates, rows=1, most_rows=2, step_ms=step_ms) == [1]
    assert lengths.choose(candidates, rows=1, most_rows=2, step_ms=steep) == [0]
    assert lengths.choose(candidates, rows=1, most_rows=2, step_ms=step_ms) == [0]


def test_a_larger_step_that_was_faster_by_chance_is_no_gain() -> None:
    lengths, candidates = DraftLengths(more_ms=lambda _: 1.0), candidates_of([(1, 3)])
    assert lengths.choose(candidates, rows=1, most_rows=2, step_ms=lambda rows: 2.0 / rows) == [0]


def test_step_times_are_asked_for_again_after_a_while() -> None:
    lengths, candidates = DraftLengths(), candidates_of([(1, 3)])
    asked = list[int]()

    def step_ms(rows: int) -> float:
        asked.append(rows)
        return 1.0

    for _ in range(2 * REMEMBERED):
        lengths.choose(candidates, rows=1, most_rows=2, step_ms=step_ms)
    assert sorted(asked) == [1, 1, 2, 2]


@given(length=st.integers(1, 24), match=st.integers(3, 24), accepted=st.lists(st.integers(0, 4), max_size=6))
def test_the_expected_tokens_are_those_that_lengths_are_chosen_by(length: int, match: int, accepted: list[int]) -> None:
    lengths, (candidate,) = DraftLengths(), candidates_of([(4, match)])
    for number in accepted:
        lengths.choose([candidate], rows=1, most_rows=5, step_ms=flat)
        lengths.verified(candidate.sequence, 4, number)
    (rate,) = lengths._rates([candidate], [lengths._history(candidate.sequence)])
    expected = lengths.expected(candidate.sequence, length, match)
    assert math.isclose(expected, sum(rate**place for place in range(1, length + 1)))
