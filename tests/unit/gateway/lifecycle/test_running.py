"""The requests in flight: one list, in one place."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequestError
from common.messages import SamplingParams
from common.peers import Incarnation
from gateway.lifecycle.running import Running
from gateway.request.active import ActiveRequest
from gateway.request.spec import GenerationSpec
from gateway.request.state import Phase, RequestState

P, D = Incarnation("p", 1), Incarnation("d", 1)


async def nobody_cancels(request: ActiveRequest, reason: str) -> None:
    raise AssertionError(reason)


def request(name: str, **facts: object) -> ActiveRequest:
    spec = GenerationSpec(request_id=name, token_ids=[1], sampling=SamplingParams(max_tokens=2), deadline_s=60)
    return ActiveRequest(RequestState(spec=spec, deadline_at=60.0, **facts), 0.0, nobody_cancels)  # type: ignore[arg-type]


def test_a_request_is_found_until_it_is_removed() -> None:
    running, one = Running(), request("r")
    running.add(one)
    assert (running.find("r"), len(running), "r" in running, list(running)) == (one, 1, True, [one])
    assert running.remove(one)
    assert (running.find("r"), len(running), "r" in running, list(running)) == (None, 0, False, [])


def test_only_the_first_end_counts() -> None:
    running, one = Running(), request("r")
    running.add(one)
    assert [running.remove(one), running.remove(one)] == [True, False]


def test_two_requests_never_share_an_id() -> None:
    running, one, twin = Running(), request("r"), request("r")
    running.add(one)
    with pytest.raises(InvalidRequestError, match="r is running already"):
        running.add(twin)
    assert not running.remove(twin)
    assert running.find("r") is one


def test_requests_may_end_while_they_are_walked_through() -> None:
    running = Running()
    for name in ("a", "b", "c"):
        running.add(request(name))
    assert [running.remove(one) for one in running] == [True, True, True]
    assert len(running) == 0


def test_a_worker_is_with_the_requests_that_it_claimed_or_decodes() -> None:
    running = Running()
    running.add(request("waits", assigned="p"))
    running.add(request("claimed", phase=Phase.CLAIMED, claimed_by=P))
    running.add(request("decoding", phase=Phase.DECODING, claimed_by=P, decoder=D))
    assert [running.num_with(worker) for worker in ("p", "d", "elsewhere")] == [2, 1, 0]


def test_needed_workers_are_those_without_which_a_request_cannot_go_on() -> None:
    running = Running()
    assert running.needed_workers() == {}
    running.add(request("waits", assigned="q"))
    running.add(request("claimed", phase=Phase.CLAIMED, claimed_by=P))
    assert running.needed_workers() == {"q": False, "p": False}
    running.add(request("decoding", phase=Phase.DECODING, claimed_by=P, decoder=D))
    assert running.needed_workers() == {"q": False, "p": False, "d": True}


def test_a_request_that_is_being_moved_needs_nobody() -> None:
    running, one = Running(), request("r", phase=Phase.CLAIMED, claimed_by=P)
    one.retrying = True
    running.add(one)
    assert running.needed_workers() == {}
