"""Who may come in, and when the others may try again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import KVLayout, Region, WorkerState
from gateway.admission import LONGEST_RETRY_S, Backlog, RequestLimits, fleet_rate, refusal

LIMITS = RequestLimits(max_requests=10, max_queued_tokens=1000)
NOTHING = Backlog(requests=0, waiting_tokens=0, unclaimed_tokens=0, claimed_tokens=0, tokens_per_s=100.0)
LAYOUT = KVLayout(num_blocks=1, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")


def backlog(**changes: float) -> Backlog:
    return Backlog(**({name: getattr(NOTHING, name) for name in Backlog.__slots__} | changes))  # type: ignore[arg-type]


def worker(prefill_rate: float = 0.0, local_rate: float = 0.0) -> WorkerState:
    return WorkerState(
        worker="w",
        incarnation=1,
        roles=[],
        status="ready",
        model="m",
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        vocab_size=10,
        max_model_len=100,
        region=Region(transport="shm", incarnation=1, layout=LAYOUT, address={}),
        prefill_tokens_per_s=prefill_rate,
        local_tokens_per_s=local_rate,
    )


@pytest.mark.parametrize(
    ("waiting", "num_tokens", "deadline_s", "told", "retry_s"),
    [
        ({}, 900, 10.0, None, 0),
        ({}, 5000, 10.0, None, 0),  # alone, a prompt may be longer than what may wait
        ({"requests": 10}, 1, 10.0, "10 requests are in flight", 1.0),
        ({"waiting_tokens": 900, "unclaimed_tokens": 400}, 300, 60.0, "900 prompt tokens wait, the limit is 1000", 2.0),
        ({"unclaimed_tokens": 600, "claimed_tokens": 600}, 1, 12.1, None, 0),
        ({"unclaimed_tokens": 600, "claimed_tokens": 600}, 1, 9.0, "what waits takes 12.0 s", 3.0),
        ({"claimed_tokens": 10**6}, 1, 9.0, "deadline is in 9.0 s", LONGEST_RETRY_S),
        (
            {"claimed_tokens": 10**6, "tokens_per_s": 0.0},
            1,
            9.0,
            None,
            0,
        ),  # nothing measured: nobody is refused for time
    ],
)
def test_who_comes_in(
    waiting: dict[str, float], num_tokens: int, deadline_s: float, told: str | None, retry_s: float
) -> None:
    error = refusal(backlog(**waiting), LIMITS, num_tokens=num_tokens, deadline_s=deadline_s)
    if told is None:
        assert error is None
    else:
        assert error is not None
        assert told in error.message
        assert error.retry_after_s == pytest.approx(retry_s)


counts = st.integers(0, 3000)


@given(
    requests=st.integers(0, 20), waiting=counts, claimed=counts, rate=st.floats(0, 1000), deadline=st.floats(0.01, 60)
)
def test_more_in_front_never_lets_in_who_was_refused(
    requests: int, waiting: int, claimed: int, rate: float, deadline: float
) -> None:
    def refused(more: int) -> bool:
        now = backlog(
            requests=requests + more,
            waiting_tokens=waiting + more,
            unclaimed_tokens=waiting + more,
            claimed_tokens=claimed + more,
            tokens_per_s=rate,
        )
        error = refusal(now, LIMITS, num_tokens=50, deadline_s=deadline)
        assert error is None or 1.0 <= error.retry_after_s <= LONGEST_RETRY_S
        return error is not None

    assert not refused(0) or refused(7)


def test_the_fleet_s_rate() -> None:
    assert fleet_rate([worker(100.0), worker(50.0)], [worker(0.0, 10.0)]) == 150.0
    assert fleet_rate([worker(100.0), worker()], []) == 200.0  # unmeasured: as the slowest that has
    assert fleet_rate([], [worker(80.0, 20.0), worker(40.0)]) == 60.0
    assert fleet_rate([worker()], [worker(100.0)]) == 0.0
