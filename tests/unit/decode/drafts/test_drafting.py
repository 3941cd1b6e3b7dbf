"""The batch's drafts: bounded by pass, server and request, awaited only where they will probably pay for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from decode.drafts.drafting import Drafting
from decode.drafts.head import LIKE_A_MATCH_OF, HeadDrafts
from decode.drafts.history import MOST_UNPAID
from decode.drafts.lengths import REMEMBERED
from decode.drafts.settings import LookupSettings
from decode.drafts.suffix import Lookup
from engine.sequence import Sequence
from tests.unit.decode.drafts.lookups import sequence_of

COPIED = [*range(40, 80)]


def copying(*, speculation: int = -1) -> Sequence:
    """A sequence in the middle of repeating its prompt."""
    sequence = sequence_of([*COPIED, *COPIED[:24]], prompt=len(COPIED))
    sequence.speculation = speculation
    return sequence


def original() -> Sequence:
    return sequence_of([*range(200, 230)], prompt=10)


def drafting(*, most: int = 8, step_ms: Callable[[int], float] = lambda rows: 10.0, wait_ms: float = 0.1) -> Drafting:
    return Drafting(Lookup(LookupSettings()), most=most, step_ms=step_ms, wait_ms=lambda _: wait_ms)


def test_drafts_have_the_most_tokens_that_server_request_and_pass_allow() -> None:
    free, bounded, without = copying(), copying(speculation=2), copying(speculation=0)
    drafts = drafting().drafts({free: 50, bounded: 50, without: 50, original(): 50}, rows=4, most_rows=100)
    assert drafts == {free: tuple(COPIED[24:32]), bounded: tuple(COPIED[24:26])}
    assert drafting().drafts({free: 3}, rows=1, most_rows=100) == {free: tuple(COPIED[24:27])}
    assert len(drafting().drafts({free: 50}, rows=1, most_rows=6)[free]) == 5


def test_without_room_or_gain_nothing_is_drafted() -> None:
    assert drafting().drafts({copying(): 8}, rows=1, most_rows=1) == {}
    assert drafting(step_ms=lambda rows: 10.0 * rows).drafts({copying(): 8}, rows=1, most_rows=100) == {}


def test_a_step_beyond_the_largest_graph_is_none() -> None:
    largest = drafting(step_ms=lambda rows: 10.0 if rows <= 4 else math.inf)
    sequence = copying()
    assert len(largest.drafts({sequence: 8}, rows=1, most_rows=100)[sequence]) == 3
    assert largest.drafts({copying(): 8}, rows=5, most_rows=100) == {}


@pytest.mark.parametrize(("wait_ms", "drafts"), [(0.0, True), (0.5, True), (100.0, False)])
def test_nothing_is_drafted_where_waiting_for_results_costs_more(wait_ms: float, drafts: bool) -> None:
    waiting = Drafting(Lookup(LookupSettings()), most=8, step_ms=lambda _: 10.0, wait_ms=lambda _: wait_ms)
    assert bool(waiting.drafts({copying(): 8}, rows=1, most_rows=100)) == drafts


@pytest.mark.parametrize(("draft_ms", "drafts"), [(0.5, True), (100.0, False)])
def test_a_head_that_costs_more_than_it_brings_pauses(draft_ms: float, drafts: bool) -> None:
    costly = Drafting(
        HeadDrafts(), most=3, step_ms=lambda _: 10.0, wait_ms=[0.0, 0.1, draft_ms].__getitem__, is_paid=True
    )
    sequences = [copying() for _ in range(3)]
    for sequence in sequences:
        sequence.proposed = (len(sequence.token_ids), (1, 2, 3))
    for _ in range(MOST_UNPAID + 1):
        assert bool(costly.drafts(dict.fromkeys(sequences[:2], 3), rows=2, most_rows=100)) == drafts
    assert [sequence.drafts_from > sequence.num_generated for sequence in sequences[:2]] == [not drafts] * 2
    assert costly.drafts({sequences[2]: 3}, rows=1, most_rows=100)


def test_before_the_first_step_is_measured_drafts_are_tried() -> None:
    assert drafting(step_ms=lambda rows: 0.0).drafts({copying(): 8}, rows=1, most_rows=100)


def test_a_draft_is_awaited_where_more_than_a_token_is_expected_of_it() -> None:
    assert drafting().awaits(copying(), rows=1)
    assert not drafting().awaits(copying(speculation=1), rows=1)
    assert not drafting().awaits(copying(speculation=0), rows=1)
    assert not drafting().awaits(original(), rows=1)


def test_forced_tokens_are_drafted_before_any_guess() -> None:
    forced = Drafting(Lookup(LookupSettings()), most=8, step_ms=lambda _: 10.0, forced=lambda _: [1, 2, 3, 4])
    sequence = original()
    assert forced.awaits(sequence, rows=1)
    assert forced.drafts({sequence: 3}, rows=1, most_rows=50) == {sequence: (1, 2, 3)}


@pytest.mark.parametrize(
    ("drafting_ones", "running", "wait_ms", "stops"), [(0, 8, 0.0, False), (8, 8, 1.0, True), (1, 64, 5.0, False)]
)
def test_others_wait_where_half_the_steps_of_those_that_draft_cost_more(
    drafting_ones: int, running: int, wait_ms: float, *, stops: bool
) -> None:
    assert drafting(wait_ms=wait_ms).stops_the_others(drafting_ones, running) == stops


class Asked:
    """A drafter that counts how often it is asked; its drafts come with a pass's results, or do not."""

    def __init__(self, *, follows_results: bool) -> None:
        self.follows_results = follows_results
        self.count = 0

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        self.count += 1
        return [1] * most

    def match_length(self, sequence: Sequence) -> int:
        return LIKE_A_MATCH_OF

    def ended(self, sequence: Sequence) -> None:
        """No-op: nothing is remembered."""


@pytest.mark.parametrize("follows_results", [False, True])
def test_where_no_draft_can_pay_nobody_tries_one_until_fewer_run(*, follows_results: bool) -> None:
    drafter = Asked(follows_results=follows_results)
    full = Drafting(drafter, most=3, step_ms=lambda rows: 10.0 if rows <= 64 else math.inf)
    batch = [original() for _ in range(64)]
    for _ in range(300):
        assert not any(full.awaits(sequence, rows=64) for sequence in batch)
        assert full.drafts(dict.fromkeys(batch, 8), rows=64, most_rows=512) == {}
        for sequence in batch:
            sequence.token_ids.append(1)
    assert drafter.count == 0
    assert all(full.awaits(sequence, rows=16) for sequence in batch[:16])
    assert len(full.drafts(dict.fromkeys(batch[:16], 8), rows=16, most_rows=512)) == 16


def test_drafts_of_a_head_that_are_refused_are_no_prospect_for_a_large_batch() -> None:
    heads = Drafting(Asked(follows_results=True), most=3, step_ms=lambda rows: 5.0 + 0.05 * rows)
    sequence = original()
    assert heads.awaits(sequence, rows=16)
    for _ in range(3):
        refused = {original(): 8 for _ in range(16)}
        for one in heads.drafts(refused, rows=16, most_rows=512):
            heads.verified(one, drafted=3, accepted=0)
    for _ in range(16 * REMEMBERED):
        awaited = heads.awaits(sequence, rows=16)
    assert not awaited
    assert heads.drafts({sequence: 8}, rows=1, most_rows=512)
