"""The choice without Redis: heartbeats and this gateway's own requests. Its formula is tested against the Lua functions."""

from __future__ import annotations

from typing import Any

from common.messages import KVLayout, Region, SamplingParams, WorkerState
from common.store import PlacementRequest
from gateway.generation import GenerationSpec
from gateway.owner import RequestState
from gateway.placer import choose_locally

LAYOUT = KVLayout(num_blocks=100, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")


def a_worker(worker: str, *roles: str, **changes: Any) -> WorkerState:
    values: dict[str, Any] = {
        "worker": worker,
        "incarnation": 1,
        "roles": list(roles),
        "status": "ready",
        "model": "model",
        "model_fingerprint": "model",
        "tokenizer_fingerprint": "tokenizer",
        "vocab_size": 100,
        "max_model_len": 2048,
        "region": Region(transport="shm", incarnation=1, layout=LAYOUT, address={}),
        "free_blocks": 100,
        "max_sequences": 8,
        "prefill_tokens_per_s": 1000.0,
    }
    return WorkerState(**(values | changes))


def a_request(**changes: Any) -> PlacementRequest:
    values: dict[str, Any] = {
        "request_id": "request",
        "attempt": 1,
        "digests": [],
        "num_tokens": 64,
        "block_size": 16,
        "reserve_tokens": 96,
        "deadline_ms": 1000,
        "model_fingerprint": "model",
    }
    return PlacementRequest(**(values | changes))


def sent(worker: str, *candidates: str, tokens: int = 64) -> RequestState:
    """A request in a worker's queue."""
    sampling = SamplingParams(max_tokens=32)
    spec = GenerationSpec(request_id="other", token_ids=[1] * tokens, sampling=sampling, deadline_s=60)
    state = RequestState(spec=spec, deadline_at=60.0)
    state.begin_attempt(0.0)
    state.placed(worker, list(candidates))
    return state


P = [a_worker("p0", "prefill"), a_worker("p1", "prefill")]
D = [a_worker("d0", "decode"), a_worker("d1", "decode")]


def test_what_was_sent_counts_until_its_first_token() -> None:
    other = sent("p0", "d0")
    assert choose_locally(P, D, a_request(), others=[other]) == ("p1", ["d1", "d0"], "load")
    other.claim(1, ("p0", 1), 0.0)
    other.settle(1, ("p0", 1), ("d1", 1))  # the decode worker has it
    assert choose_locally(P, D, a_request(), others=[other]) == ("p0", ["d0", "d1"], "load")


def test_a_request_that_is_nowhere_or_over_counts_nowhere() -> None:
    nowhere = sent("")
    elsewhere = sent("gone", "gone too")
    assert choose_locally(P, D, a_request(), others=[nowhere, elsewhere]) == ("p0", ["d0", "d1"], "load")


def test_excluded_workers_are_chosen_only_when_nobody_else_decodes() -> None:
    assert choose_locally(P, D, a_request(exclude=["p0", "d0"]), others=[]) == ("p1", ["d1"], "load")
    request = a_request(exclude=["p0", "p1"])
    assert choose_locally(P, D, request, others=[]) == ("d0", [], "local: no prefill worker")
    request = a_request(exclude=["d0", "d1"])
    assert choose_locally(P, D, request, others=[]) == ("p0", ["d0", "d1"], "load")


def test_prompts_are_prefilled_on_a_decode_worker_without_redis_as_well() -> None:
    busy = [a_worker("p0", "prefill", queued_tokens=5000)]
    assert choose_locally(busy, D, a_request(cut_over_tokens=-1), others=[]) == ("d0", [], "local: earlier")


def test_who_computes_a_prompt_may_always_go_on_with_it_if_it_decodes() -> None:
    """Prompts of several such workers would wait for each other's room when all are full."""
    fleet = [a_worker(f"w{number}", "prefill", "decode", decode_step_ms=1.0) for number in range(6)]
    fleet.append(a_worker("fast", "prefill", "decode", prefill_tokens_per_s=1e6, running=8, decode_step_ms=9.0))
    chosen = choose_locally(fleet, fleet, a_request(cut_over_tokens=0), others=[])
    assert chosen == ("fast", ["w0", "w1", "w2", "fast"], "load")
