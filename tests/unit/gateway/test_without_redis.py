"""The rule without Redis: the least predicted wait, then the most free blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.messages import SamplingParams, WorkerState
from common.peers import Incarnation
from gateway.placement.without_redis import choose, loads_of
from gateway.request.placement import Reason
from gateway.request.spec import GenerationSpec
from gateway.request.state import Phase, RequestState
from tests.fakes.workers import a_worker

LOAD, FULL = Reason.HEARTBEATS_LOAD, Reason.HEARTBEATS_FULL
SHORT, SAME = Reason.HEARTBEATS_LOCAL_SHORT, Reason.HEARTBEATS_LOCAL_SAME_WORKER
NO_PREFILL = Reason.HEARTBEATS_LOCAL_NO_PREFILL
P0, P1 = a_worker("p0", "prefill"), a_worker("p1", "prefill")
D0, D1 = a_worker("d0", "decode"), a_worker("d1", "decode")


def place(*workers: WorkerState, others: Sequence[RequestState] = (), **changes: Any) -> tuple[str, list[str], Reason]:
    request: dict[str, Any] = {"num_tokens": 64, "reserve_tokens": 96, "cut_over_tokens": 0} | changes
    placement = choose(loads_of(workers, others), **request)
    return placement.prefill, placement.decode, placement.reason


def sent(worker: str, *candidates: str, tokens: int = 64) -> RequestState:
    """A request in a worker's queue."""
    sampling = SamplingParams(max_tokens=32)
    spec = GenerationSpec(request_id="other", token_ids=[1] * tokens, sampling=sampling, deadline_s=60)
    state = RequestState(spec=spec, deadline_at=60.0)
    state.begin_attempt(0.0)
    state.placed(worker, list(candidates))
    return state


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param([P0, P1, D0, D1], ("p0", ["d0", "d1"], LOAD), id="equal: by name"),
        pytest.param([a_worker("p0", "prefill", queued_tokens=1), P1, D0], ("p1", ["d0"], LOAD), id="shorter queue"),
        pytest.param(
            [a_worker("p0", "prefill", queued_tokens=100, prefill_tokens_per_s=9000.0), P1, D0],
            ("p0", ["d0"], LOAD),
            id="longer queue of a faster worker",
        ),
        pytest.param(
            [
                a_worker("p0", "prefill", prefill_tokens_per_s=0.0),
                a_worker("p1", "prefill", prefill_tokens_per_s=2e3),
                D0,
            ],
            ("p0", ["d0"], LOAD),
            id="unmeasured is as fast as the slowest measured",
        ),
        pytest.param(
            [a_worker("p0", "prefill", prefill_tokens_per_s=0.0, queued_tokens=9), P1, D0],
            ("p1", ["d0"], LOAD),
            id="unmeasured with a queue",
        ),
        pytest.param(
            [
                a_worker("p0", "prefill", prefill_tokens_per_s=0.0, queued_tokens=9),
                a_worker("p1", "prefill", prefill_tokens_per_s=0.0),
                D0,
            ],
            ("p1", ["d0"], LOAD),
            id="nobody measured: by tokens",
        ),
        pytest.param([P0, a_worker("d0", "decode", free_blocks=50), D1], ("p0", ["d1", "d0"], LOAD), id="free blocks"),
        pytest.param([P0, a_worker("d0", "decode", running=8), D1], ("p0", ["d1", "d0"], LOAD), id="no sequence free"),
        pytest.param(
            [P0, a_worker("d0", "decode", running=7, waiting=1), a_worker("d1", "decode", free_blocks=9)],
            ("p0", ["d1", "d0"], LOAD),
            id="few free blocks before none",
        ),
        pytest.param([P0, a_worker("d0", "decode", free_blocks=5)], ("p0", ["d0"], FULL), id="no blocks: full"),
        pytest.param([P0, a_worker("d0", "decode", running=8)], ("p0", ["d0"], FULL), id="no sequences: full"),
        pytest.param([D0, D1], ("d0", [], NO_PREFILL), id="nobody prefills"),
        pytest.param([a_worker("w", "prefill", "decode")], ("w", [], SAME), id="one for both"),
        pytest.param(
            [P0, *(a_worker(f"d{number}", "decode") for number in range(6))],
            ("p0", ["d0", "d1", "d2", "d3"], LOAD),
            id="four candidates at most",
        ),
    ],
)
def test_a_fleet_has_one_place(workers: list[WorkerState], expected: tuple[str, list[str], Reason]) -> None:
    assert place(*workers) == expected
    assert place(*reversed(workers)) == expected


@pytest.mark.parametrize(("cut_over_tokens", "expected"), [(64, ("d0", [], SHORT)), (63, ("p0", ["d0"], LOAD))])
def test_short_prompts_are_prefilled_where_they_decode(cut_over_tokens: int, expected: Any) -> None:
    assert place(P0, D0, cut_over_tokens=cut_over_tokens) == expected


def test_prompts_stay_on_prefill_workers_when_only_costs_could_say_otherwise() -> None:
    """`cut_over_tokens` -1 asks for a comparison that needs the ledger."""
    busy = a_worker("p0", "prefill", queued_tokens=5000)
    assert place(busy, D0, cut_over_tokens=-1) == ("p0", ["d0"], LOAD)


def test_what_was_sent_counts_until_its_first_token() -> None:
    other = sent("p0", "d0")
    assert place(P0, P1, D0, D1, others=[other]) == ("p1", ["d1", "d0"], LOAD)
    other.claim(1, Incarnation("p0", 1), 0.0)
    other.settle(1, Incarnation("p0", 1), Incarnation("d1", 1))  # the decode worker has it
    assert place(P0, P1, D0, D1, others=[other]) == ("p0", ["d0", "d1"], LOAD)


def test_the_heartbeat_and_what_was_sent_are_the_same_work() -> None:
    """The larger counts, not the sum: a worker tells of what it was sent."""
    p0 = a_worker("p0", "prefill", queued_tokens=64)
    p1 = a_worker("p1", "prefill", queued_tokens=100)
    assert place(p0, p1, D0, others=[sent("p0", "d0")]) == ("p0", ["d0"], LOAD)


def test_a_request_that_is_nowhere_or_over_counts_nowhere() -> None:
    over = sent("p0", "d0")
    over.phase = Phase.ENDED
    assert place(P0, P1, D0, D1, others=[sent(""), sent("gone", "gone too"), over]) == ("p0", ["d0", "d1"], LOAD)


def test_excluded_workers_are_chosen_only_when_nobody_else_decodes() -> None:
    fleet = (P0, P1, D0, D1)
    assert place(*fleet, exclude=["p0", "d0"]) == ("p1", ["d1"], LOAD)
    assert place(*fleet, exclude=["p0", "p1"]) == ("d0", [], NO_PREFILL)
    assert place(*fleet, exclude=["d0", "d1"]) == ("p0", ["d0", "d1"], LOAD)


def test_who_computes_a_prompt_may_always_go_on_with_it_if_it_decodes() -> None:
    """Prompts of several such workers would wait for each other's room when all are full."""
    fleet = [a_worker(f"w{number}", "prefill", "decode", queued_tokens=9) for number in range(6)]
    fast = a_worker("x-fast", "prefill", "decode", prefill_tokens_per_s=1e6, running=8)
    assert place(*fleet, fast) == ("x-fast", ["w0", "w1", "w2", "x-fast"], LOAD)
