"""Placement while roles change: what Redis chose counts only if the heartbeats still say so when its answer is here."""

from __future__ import annotations

from typing import Any, cast

import pytest

from common.errors import UnavailableError
from common.messages import SamplingParams, WorkerState
from common.peers import Peers
from common.store import Placement, PlacementRequest
from gateway.generation import GenerationSpec
from gateway.owner import RequestState
from gateway.placer import Placer
from tests.unit.gateway.test_placement import a_worker


class LateStore:
    """Answers with what it chose before `meanwhile` was heard, or not at all (None)."""

    def __init__(self, placement: Placement | None, peers: Peers, meanwhile: list[WorkerState]) -> None:
        self._placement = placement
        self._peers = peers
        self._meanwhile = meanwhile

    async def place(self, request: PlacementRequest) -> Placement:
        for state in self._meanwhile:
            self._peers.saw(state)
        if self._placement is None:
            raise UnavailableError("Redis is away")
        return self._placement


async def place(prefill: str | None, decode: list[str], *meanwhile: WorkerState) -> tuple[str, list[str], str]:
    peers = Peers(clock=lambda: 0.0)
    for state in (a_worker("p0", "prefill"), a_worker("p1", "prefill"), a_worker("d0", "decode")):
        peers.saw(state)
    placement = Placement(prefill=prefill, decode=decode, reason="redis") if prefill else None
    store = LateStore(placement, peers, list(meanwhile))
    placer = Placer(store=cast(Any, store), peers=peers, cut_over_tokens=0)
    spec = GenerationSpec(
        request_id="r", token_ids=[1] * 64, sampling=SamplingParams(max_tokens=8, temperature=0.0), deadline_s=60
    )
    placement = await placer.place(RequestState(spec=spec, deadline_at=1e12), [])
    return placement.prefill, placement.decode, placement.reason


async def test_a_choice_among_present_roles_is_taken() -> None:
    assert await place("p0", ["d0"]) == ("p0", ["d0"], "redis")
    assert await place("d0", []) == ("d0", [], "redis")


async def test_a_worker_that_changed_its_role_meanwhile_is_not_taken() -> None:
    prefill, decode, reason = await place("p0", ["d0"], a_worker("p0", "decode"))
    assert prefill == "p1"
    assert "p0" in decode
    assert reason.startswith("without redis")
    prefill, decode, _ = await place("d0", [], a_worker("d0", "prefill"), a_worker("p1", "decode"))
    assert decode == ["p1"]
    assert prefill in ("p0", "d0")


@pytest.mark.parametrize("chosen", ["p0", None])
async def test_without_anybody_who_decodes_there_is_no_choice(chosen: str | None) -> None:
    with pytest.raises(UnavailableError, match="no decode worker"):
        await place(chosen, ["d0"], a_worker("d0", "prefill"))


async def test_without_redis_roles_count_as_they_are_after_the_call() -> None:
    prefill, decode, _ = await place(None, [], a_worker("d0", "prefill"), a_worker("p1", "decode"))
    assert decode == ["p1"]
    assert prefill in ("p0", "d0")
