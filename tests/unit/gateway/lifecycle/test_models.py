"""Two models on one bus: a request goes only to workers that have its model's weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import InvalidRequestError, UnavailableError, WorkerFailedError
from common.messages import Failed, GatewayState, ModelLoad, TenantPlaces
from gateway.answers.tokenizer import ChatTokenizer
from gateway.lifecycle.attempts import Why
from gateway.lifecycle.silence import Patience
from gateway.request.active import ActiveRequest
from gateway.request.ends import End
from gateway.tenants.tenants import ANYBODY
from tests.unit.gateway.lifecycle.conftest import Gateway, open_gateway


@pytest.fixture
async def gateway(tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    """It serves `a` and `b`; of each there is a worker that prefills and one that decodes."""
    async with open_gateway({"a": tokenizer, "b": tokenizer}) as world:
        for model in ("a", "b"):
            facts = {"model": model, "model_fingerprint": f"{model}'s"}
            await world.worker(f"p-{model}", "prefill", max_model_len=100 if model == "a" else 50, **facts)
            await world.worker(f"d-{model}", "decode", max_model_len=200 if model == "a" else 50, **facts)
        yield world


async def submit(gateway: Gateway, model: str, name: str = "r", tokens: int = 40) -> ActiveRequest:
    weights = gateway.requests.catalogue.fingerprint(model)
    return await gateway.submit(name, model=model, model_fingerprint=weights, token_ids=[1] * tokens)


async def test_a_request_is_placed_on_workers_of_its_model(gateway: Gateway) -> None:
    a, b = await submit(gateway, "a", "ra"), await submit(gateway, "b", "rb")
    assert [(one.state.assigned, one.state.candidates) for one in (a, b)] == [("p-a", ["d-a"]), ("p-b", ["d-b"])]
    assert a.job is not None
    assert b.job is not None
    assert a.job.hash_root != b.job.hash_root  # equal prompts, and no block is mistaken for the other's
    assert [load.counters["placed:without redis: load"] for load in gateway.requests.loads.values()] == [1, 1]


async def test_the_longest_prompt_is_the_models_own(gateway: Gateway) -> None:
    await submit(gateway, "a", "long", tokens=60)
    with pytest.raises(InvalidRequestError, match="60 tokens, the context 50"):
        await submit(gateway, "b", tokens=60)


async def test_a_prompt_that_no_prefill_worker_takes_is_computed_where_it_is_decoded(gateway: Gateway) -> None:
    assert (await submit(gateway, "a", "short", tokens=99)).state.assigned == "p-a"
    assert (await submit(gateway, "a", "long", tokens=100)).state.assigned == "d-a"


async def test_a_model_without_decode_workers_is_refused_by_name_and_the_other_served(gateway: Gateway) -> None:
    await gateway.workers["d-b"].stop()
    gateway.requests.turn_away(ANYBODY, priority=0)  # which model is wanted is not known yet
    with pytest.raises(UnavailableError, match="no decode worker of model 'b' is ready"):
        gateway.requests.turn_away(ANYBODY, priority=0, model="b")
    with pytest.raises(UnavailableError, match="no decode worker of model 'b' is ready"):
        await submit(gateway, "b")
    assert (await submit(gateway, "a")).state.assigned == "p-a"
    assert gateway.requests.ready


async def test_a_failed_attempt_never_moves_to_another_models_worker(gateway: Gateway) -> None:
    await gateway.worker("p-a2", "prefill", model="a", model_fingerprint="a's")
    request = await submit(gateway, "a")
    for worker in ("p-a", "p-a2"):
        assert request.state.assigned == worker
        await gateway.workers[worker].claim(request)
        failure = {"code": WorkerFailedError.code, "message": "the pass failed", "retryable": True}
        await gateway.workers[worker].say(Failed, request, **failure)
        await gateway.idle()
    assert request.state.assigned == "d-a"  # the last one left
    assert [queue for queue, _ in gateway.bus.queued.values()] == ["d-a"]


async def test_an_unclaimed_job_is_not_moved_because_another_model_has_a_prefill_worker(gateway: Gateway) -> None:
    await gateway.requests.start()
    request = await submit(gateway, "a")
    await asyncio.sleep(Patience().unclaimed_s + 0.2)
    assert request.state.attempt == 1
    await gateway.worker("p-a2", "prefill", model="a", model_fingerprint="a's")
    await asyncio.sleep(0.2)
    assert request.state.assigned == "p-a2"
    await gateway.requests.close()


async def test_a_request_without_a_token_takes_newer_weights_and_one_with_tokens_does_not(gateway: Gateway) -> None:
    waits, decoding = await submit(gateway, "a", "waits"), await submit(gateway, "a", "decoding")
    await gateway.workers["p-a"].claim(decoding)
    gateway.workers["p-a"].send(decoding, 0, 100)
    for name, role in (("p-new", "prefill"), ("d-new", "decode"), ("d-new2", "decode")):
        await gateway.worker(name, role, model="a", model_fingerprint="newer")
    for request in (waits, decoding):
        await gateway.requests.attempts.move(request, Why(end=End.REQUEST_LOST))
    assert (waits.state.assigned, waits.state.spec.model_fingerprint) == ("p-new", "newer")
    assert (decoding.state.assigned, decoding.state.spec.model_fingerprint) == ("p-a", "a's")


async def test_the_heartbeat_tells_each_models_load_and_others_are_believed_by_model(gateway: Gateway) -> None:
    await submit(gateway, "a")
    requests = gateway.requests
    state = requests.rooms.tell(GatewayState(gateway="here", incarnation=1), requests.seen.running)
    assert state.models == {
        "a": ModelLoad(started_tokens=40, unclaimed_tokens=40, tenants={"default": TenantPlaces(held=1)})
    }
    loads = {"a": ModelLoad(waiting_tokens=7), "b": ModelLoad(waiting_tokens=5)}
    requests.capacities.saw(GatewayState(gateway="there", incarnation=1, waiting_tokens=12, models=loads))
    waiting = [requests.capacities.capacity([], model=m, weights=f"{m}'s").waiting_elsewhere for m in ("a", "b")]
    assert waiting == [7, 5]
    requests.capacities.saw(GatewayState(gateway="there", incarnation=1, waiting_tokens=12))  # an older release
    assert requests.capacities.capacity([], model="a", weights="a's").waiting_elsewhere == 12


async def test_each_models_capacity_is_its_own_workers(gateway: Gateway) -> None:
    await gateway.worker("p-a2", "prefill", model="a", model_fingerprint="a's")
    await submit(gateway, "a")
    fleet, running = gateway.requests.capacities, gateway.requests.seen.running
    a = fleet.capacity(running, model="a", weights="a's")
    b = fleet.capacity(running, model="b", weights="b's")
    assert (len(a.workers), sum(one.queued_tokens for one in a.workers)) == (2, 40)
    assert (len(b.workers), sum(one.queued_tokens for one in b.workers)) == (1, 0)
    assert fleet.capacity(running, model="c", weights="").workers == ()
