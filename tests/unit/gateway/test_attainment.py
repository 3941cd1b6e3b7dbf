"""What a heartbeat says of service levels and queues, from requests at given instants."""

from __future__ import annotations

from common.errors import DeadlineExceededError, InvalidRequestError
from common.messages import GatewayState, Goal, SamplingParams, Tokens
from gateway.observe.attainment import Attainment, ServiceLevels
from gateway.request.active import ActiveRequest
from gateway.request.attempt import AttemptLine
from gateway.request.spec import Aim, GenerationSpec, Origin
from gateway.request.state import Phase, RequestState


def attainment(window_s: float = 30.0) -> Attainment:
    return Attainment(ServiceLevels(window_s=window_s), started_at=0.0)


def request(name: str, at: float, *, prompt: int = 100, local: bool = False, priority: int = 0) -> ActiveRequest:
    async def on_cancel(active: ActiveRequest, reason: str) -> None:
        raise AssertionError("nobody cancels")

    spec = GenerationSpec(
        request_id=name,
        token_ids=[0] * prompt,
        sampling=SamplingParams(max_tokens=1000),
        deadline_s=60,
        origin=Origin(received_at=at),
        priority=priority,
        aim=Aim() if priority < 0 else Aim(Goal(ttft_ms=1000.0, tpot_ms=100.0)),
    )
    active = ActiveRequest(RequestState(spec=spec, deadline_at=at + 60), at, on_cancel)
    decode = [] if local else ["d"]
    active.timeline.began(AttemptLine(number=1, began_at=at, prefill="p", decode=decode, reason="", because=""))
    return active


def take(active: ActiveRequest, tokens: int, at: float, *, cached: int = 0) -> None:
    frame = Tokens(request_id="", attempt=1, position=0, token_ids=b"", cached_tokens=cached)
    active.timeline.took(frame, tokens, "", at)
    active.state.phase = Phase.DECODING


def beat(counts: Attainment, requests: list[ActiveRequest], now: float) -> GatewayState:
    return counts.state("g", 1, requests, now)


def test_first_tokens_count_once_in_time_or_late_and_so_does_one_that_is_missing_for_too_long() -> None:
    counts = attainment()
    soon, late, missing = (request(name, 10.0) for name in ("soon", "late", "missing"))
    take(soon, 1, 10.9)
    take(late, 1, 11.1)
    first = beat(counts, [soon, late, missing], 10.95)
    assert (first.ttft_met, first.ttft_count) == (1, 2)
    again = beat(counts, [soon, late, missing], 11.5)
    assert (again.ttft_met, again.ttft_count) == (1, 3)
    take(missing, 1, 11.6)
    counts.ended(missing, None, 11.7)
    after = beat(counts, [soon, late], 12.0)
    assert (after.ttft_met, after.ttft_count) == (1, 3)


def test_a_request_that_failed_without_a_token_missed_its_level_but_not_by_the_client_s_fault() -> None:
    counts = attainment()
    counts.ended(request("a", 0.0), DeadlineExceededError("late"), 1.0)
    counts.ended(request("b", 0.0), InvalidRequestError("wrong"), 1.0)
    counts.ended(request("c", 0.0), None, 1.0)  # its client left
    state = beat(counts, [], 2.0)
    assert (state.ttft_met, state.ttft_count) == (0, 1)


def test_the_lowest_tier_is_work_without_service_levels() -> None:
    counts = attainment()
    late, failed, missing = (request(name, 0.0, priority=-1) for name in ("late", "failed", "missing"))
    take(late, 1, 5.0)
    beat(counts, [late, failed, missing], 6.0)
    take(late, 2, 9.0)
    counts.ended(failed, DeadlineExceededError("late"), 9.0)
    state = beat(counts, [late, missing], 10.0)
    assert (state.ttft_count, state.tpot_count) == (0, 0)
    assert state.arriving_tokens_per_s == 300 / 10.0


def test_a_running_stream_is_sampled_with_each_beat_and_an_ended_one_once_more() -> None:
    counts = attainment()
    fast, stalled, short = (request(name, 0.0) for name in ("fast", "stalled", "short"))
    for active in (fast, stalled, short):
        take(active, 1, 0.5)
    assert beat(counts, [fast, stalled, short], 1.0).tpot_count == 0
    take(fast, 10, 1.5)
    state = beat(counts, [fast, stalled], 2.0)
    assert (state.tpot_met, state.tpot_count) == (1, 2)
    take(short, 5, 2.1)
    counts.ended(short, None, 2.1)  # 1.6 s for 5 tokens
    take(fast, 4, 2.2)
    counts.ended(fast, None, 1.8)  # 1.3 s for 14
    state = beat(counts, [], 2.5)
    assert (state.tpot_met, state.tpot_count) == (2, 4)


def test_old_counts_leave_the_window() -> None:
    counts = attainment(window_s=10.0)
    active = request("a", 0.0)
    take(active, 1, 0.5)
    assert beat(counts, [active], 1.0).ttft_count == 1
    assert beat(counts, [], 10.9).ttft_count == 1
    assert beat(counts, [], 11.1).ttft_count == 0


def test_arrivals_count_as_far_as_prefill_workers_compute_them() -> None:
    counts = attainment(window_s=10.0)
    assert beat(counts, [request("unknown", 0.0, prompt=1000)], 10.0).arriving_tokens_per_s == 100.0

    cached, local, handed = (
        request(name, 10.0, prompt=1000, local=name == "local") for name in ("cached", "local", "handed")
    )
    for active, hit in (cached, 600), (local, 0), (handed, 0):
        take(active, 1, 10.2, cached=hit)
    state = beat(counts, [cached, local, handed], 11.0)  # of 3000 tokens, 1400 were computed by prefill workers
    assert abs(state.arriving_tokens_per_s - 400.0 * 1400 / 3000) < 1e-9


def test_a_request_that_vanished_is_forgotten() -> None:
    counts = attainment()
    beat(counts, [request("a", 0.0)], 1.0)
    beat(counts, [], 2.0)
    assert counts._seen == {}


def test_what_waits_is_counted_by_where_it_waits() -> None:
    counts = attainment()
    queued, claimed, passing = (request(name, 0.0, prompt=50) for name in ("queued", "claimed", "passing"))
    claimed.state.phase, passing.state.phase = Phase.CLAIMED, Phase.PREFILLED
    state = beat(counts, [queued, claimed, passing], 0.5)
    assert (state.queued_requests, state.queued_tokens, state.handing_over) == (1, 50, 1)


def test_each_model_has_its_own_figures_and_the_sums_are_of_all() -> None:
    counts = attainment()
    first, second, waits = (request(name, 10.0) for name in ("first", "second", "waits"))
    for active, model in ((first, "a"), (second, "b"), (waits, "b")):
        active.timeline.model = model
    take(first, 1, 10.5)
    take(second, 1, 12.0)
    state = beat(counts, [first, second, waits], 12.5)
    a, b = state.levels["a"], state.levels["b"]
    assert (a.ttft_met, a.ttft_count, a.queued_tokens) == (1, 1, 0)
    assert (b.ttft_met, b.ttft_count, b.queued_tokens) == (0, 2, 100)
    assert (state.ttft_met, state.ttft_count, state.queued_requests, state.queued_tokens) == (1, 3, 1, 100)
    assert state.arriving_tokens_per_s == a.arriving_tokens_per_s + b.arriving_tokens_per_s
