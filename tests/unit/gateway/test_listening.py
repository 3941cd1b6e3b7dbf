"""What the gateway answers a worker."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from common.messages import Claim, SamplingParams
from gateway.active import ActiveRequest
from gateway.generation import GenerationSpec
from gateway.listening import Listening
from gateway.owner import RequestState

WORKER = ("p0", 7)


def claim(active: ActiveRequest | None, *, attempt: int = 1, is_held: bool = False) -> tuple[bool, str]:
    message = Claim(request_id="r", attempt=attempt, worker=WORKER[0], incarnation=WORKER[1], is_held=is_held)
    gateway = SimpleNamespace(_counters=Counter[str]())
    reply = Listening._claim(cast(Any, gateway), active, message, WORKER)
    return reply.granted, reply.reason


def test_a_worker_that_holds_a_claim_may_ask_whether_it_is_still_wanted() -> None:
    """That is no later beginning: the time in the queue ended with the first claim, or with one whose answer was lost."""
    spec = GenerationSpec(request_id="r", token_ids=[1], sampling=SamplingParams(max_tokens=2), deadline_s=60)
    state = RequestState(spec=spec, deadline_at=1e12)
    state.begin_attempt(0.0)
    state.placed("p0", ["d0"])
    active = ActiveRequest(state, 0.0, cast(Any, None))
    assert claim(active) == (True, "")
    first = active.claimed_at
    assert claim(active) == (True, "")
    again = active.claimed_at
    assert first is not None
    assert again is not None
    assert again > first
    assert claim(active, is_held=True) == (True, "")
    assert active.claimed_at == again
    state.begin_attempt(0.0)
    assert claim(active, is_held=True) == (False, "stale attempt")
    assert claim(None, is_held=True) == (False, "unknown")
