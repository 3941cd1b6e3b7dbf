"""The batch's drafts: bounded by pass, server and request, awaited only where they will probably pay for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from decode.drafts.drafting import Drafting
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


def drafting(*, most: int = 8, step_ms: Callable[[int], float] = lambda rows: 10.0, sync_ms: float = 0.1) -> Drafting:
    return Drafting(Lookup(LookupSettings()), most=most, step_ms=step_ms, sync_ms=sync_ms)


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


def test_before_the_first_step_is_measured_drafts_are_tried() -> None:
    assert drafting(step_ms=lambda rows: 0.0).drafts({copying(): 8}, rows=1, most_rows=100)


def test_a_draft_is_awaited_where_more_than_a_token_is_expected_of_it() -> None:
    assert drafting().awaits(copying())
    assert not drafting().awaits(copying(speculation=1))
    assert not drafting().awaits(copying(speculation=0))
    assert not drafting().awaits(original())


def test_forced_tokens_are_drafted_before_any_guess() -> None:
    forced = Drafting(Lookup(LookupSettings()), most=8, step_ms=lambda _: 10.0, forced=lambda _: [1, 2, 3, 4])
    sequence = original()
    assert forced.awaits(sequence)
    assert forced.drafts({sequence: 3}, rows=1, most_rows=50) == {sequence: (1, 2, 3)}


@pytest.mark.parametrize(
    ("drafting_ones", "running", "sync_ms", "stops"), [(0, 8, 0.0, False), (8, 8, 1.0, True), (1, 64, 5.0, False)]
)
def test_others_wait_where_half_the_steps_of_those_that_draft_cost_more(
    drafting_ones: int, running: int, sync_ms: float, *, stops: bool
) -> None:
    assert drafting(sync_ms=sync_ms).stops_the_others(drafting_ones, running) == stops
