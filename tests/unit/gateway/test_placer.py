"""Placement while roles change: what Redis chose counts only if the heartbeats still say so when its answer is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from common.errors import UnavailableError
from common.messages import Feature, Grammar, Region, SamplingParams, WorkerState
from common.messages.jobs import NEEDED
from common.peers import Peers
from gateway.placement.agreement import Agreement, Own
from gateway.placement.ledger import PlacementRequest
from gateway.placement.placer import Placer
from gateway.request.placement import Charged, Placement, Reason
from gateway.request.spec import GenerationSpec, Sharing
from gateway.request.state import RequestState
from tests.fakes.workers import LAYOUT, a_worker

ROLES = ("prefill", "decode")


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

    async def release(self, charges: Sequence[Charged]) -> int:
        """Nothing is charged here."""
        return len(charges)


async def place(prefill: str | None, decode: list[str], *meanwhile: WorkerState) -> tuple[str, list[str], str]:
    peers = Peers(clock=lambda: 0.0)
    for state in (a_worker("p0", "prefill"), a_worker("p1", "prefill"), a_worker("d0", "decode")):
        peers.saw(state)
    placement = Placement(prefill=prefill, decode=decode, reason=Reason.LOAD) if prefill else None
    store = LateStore(placement, peers, list(meanwhile))
    placer = Placer(store=store, agreement=Agreement(peers), cut_over_tokens=0)
    spec = GenerationSpec(
        request_id="r", token_ids=[1] * 64, sampling=SamplingParams(max_tokens=8, temperature=0.0), deadline_s=60
    )
    placement = await placer.place(RequestState(spec=spec, deadline_at=1e12), [])
    return placement.prefill, placement.decode, placement.reason


def a_placer(*states: WorkerState) -> Placer:
    """Without Redis."""
    peers = Peers(clock=lambda: 0.0)
    for state in states:
        peers.saw(state)
    return Placer(store=LateStore(None, peers, []), agreement=Agreement(peers), cut_over_tokens=0)


def a_request_for(model: str, grammar: Grammar | None = None) -> RequestState:
    spec = GenerationSpec(
        request_id="r",
        token_ids=[1] * 64,
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        deadline_s=60,
        model_fingerprint=model,
        grammar=grammar,
    )
    return RequestState(spec=spec, deadline_at=1e12)


def with_blocks(dtype: str) -> dict[str, Any]:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    return {"region": Region(transport="shm", incarnation=1, layout=layout, address={})}


def with_heads(heads: int) -> dict[str, Any]:
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=heads)
    return {"region": Region(transport="shm", incarnation=1, layout=layout, address={})}


async def test_a_request_goes_to_workers_of_its_model_alone() -> None:
    models = [a_worker(f"{model}-{role}", role, model_fingerprint=model) for model in "ab" for role in ROLES]
    placer = a_placer(*models)
    for model in "ab":
        placement = await placer.place(a_request_for(model), [])
        assert (placement.prefill, placement.decode) == (f"{model}-prefill", [f"{model}-decode"])
    assert placer.root(a_request_for("a").spec) != placer.root(a_request_for("b").spec)
    with pytest.raises(UnavailableError, match="no decode worker"):
        await placer.place(a_request_for("c"), [])


def test_requests_of_different_adapters_never_share_kv() -> None:
    placer = a_placer(a_worker("d0", "decode"))
    spec = a_request_for("").spec
    roots = {placer.root(dataclasses.replace(spec, sharing=Sharing(adapter=name))) for name in ("", "sql", "legal")}
    assert len(roots) == 3


async def test_while_a_model_s_blocks_change_its_requests_stay_with_most_decode_workers() -> None:
    """Prefill and decode workers of one request must have the same kind of blocks."""
    new = [a_worker(f"new-{role}", role, **with_blocks("bfloat16")) for role in ROLES]
    old = [a_worker(f"old-{role}", role) for role in ROLES]
    placer = a_placer(*new, *old, a_worker("new-decode-2", "decode", **with_blocks("bfloat16")))
    placement = await placer.place(a_request_for("model"), [])
    assert placement.prefill == "new-prefill"
    assert set(placement.decode) == {"new-decode", "new-decode-2"}


async def test_a_request_goes_to_workers_that_are_long_enough_for_it() -> None:
    """Its prompt has 64 tokens, its answer 8."""
    short = [a_worker("short", "decode", max_model_len=71), a_worker("p-short", "prefill", max_model_len=64)]
    long = [a_worker("long", "decode", max_model_len=72), a_worker("p-long", "prefill", max_model_len=65)]
    both = a_worker("both", *ROLES, max_model_len=71)
    placement = await a_placer(*short, *long, both).place(a_request_for("model"), [])
    assert (placement.prefill, placement.decode) == ("p-long", ["long"])
    placement = await a_placer(*short, long[0]).place(a_request_for("model"), [])
    assert (placement.prefill, placement.decode) == ("long", [])


async def test_an_answer_that_no_worker_is_long_enough_for_goes_on_as_far_as_it_can() -> None:
    """The one that was long enough died."""
    placement = await a_placer(*(a_worker(role, role, max_model_len=70) for role in ROLES)).place(
        a_request_for("model"), []
    )
    assert (placement.prefill, placement.decode) == ("prefill", ["decode"])
    with pytest.raises(UnavailableError, match="no decode worker"):
        await a_placer(a_worker("d", "decode", max_model_len=64)).place(a_request_for("model"), [])


async def test_a_choice_among_present_roles_is_taken() -> None:
    assert await place("p0", ["d0"]) == ("p0", ["d0"], Reason.LOAD)
    assert await place("d0", []) == ("d0", [], Reason.LOAD)


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


def on_host(name: str, *roles: str, **changes: Any) -> WorkerState:
    """A worker whose KV goes through its host's shared memory; the host is the last letter of its name."""
    region = Region(transport="shm", incarnation=1, layout=LAYOUT, address={"reach": name[-1]})
    return a_worker(name, *roles, region=region, **changes)


class NotingStore(LateStore):
    """Remembers whom it may not choose."""

    def __init__(self, placement: Placement | None, peers: Peers) -> None:
        super().__init__(placement, peers, [])
        self.excluded: list[list[str]] = []

    async def place(self, request: PlacementRequest) -> Placement:
        self.excluded.append(sorted(request.exclude))
        return await super().place(request)


async def test_a_request_stays_among_workers_that_can_hand_over_to_each_other() -> None:
    placer = a_placer(*(on_host(f"{role}-{host}", role, max_sequences=4) for role in ROLES for host in "ab"))
    flying: list[RequestState] = []
    for _ in range(8):
        state = a_request_for("model")
        placement = await placer.place(state, flying)
        state.placed(placement.prefill, placement.decode)
        flying.append(state)
    pairs = [(state.assigned, state.candidates) for state in flying]
    assert sorted(pairs) == [("prefill-a", ["decode-a"])] * 4 + [("prefill-b", ["decode-b"])] * 4


async def test_a_retry_leaves_the_island_whose_only_decode_worker_is_excluded() -> None:
    placer = a_placer(*(on_host(f"{role}-{host}", role) for role in ROLES for host in "ab"))
    state = a_request_for("model")
    state.excluded.append("decode-a")
    assert (await placer.place(state, [])).prefill == "prefill-b"


@pytest.mark.parametrize(
    ("stranger", "changes"),
    [
        ("p0", {"tokenizer_fingerprint": "other"}),
        ("p0", {"region": Region(transport="ucx", incarnation=1, layout=LAYOUT, address={})}),
        ("p0", {"region": Region(transport="shm", incarnation=1, layout=LAYOUT, address={"reach": "b"})}),
        ("p0", with_heads(2)),
    ],
)
async def test_redis_may_not_choose_workers_that_differ_in_what_it_does_not_know(
    stranger: str, changes: dict[str, Any]
) -> None:
    """To Redis they are of one kind: weights, KV dtype and block size are equal."""
    peers = Peers(clock=lambda: 0.0)
    for state in (a_worker(stranger, "prefill", **changes), on_host("p-a", "prefill"), on_host("d-a", "decode")):
        peers.saw(state)
    store = NotingStore(Placement(prefill=stranger, decode=["d-a"], reason=Reason.LOAD), peers)
    placer = Placer(store=store, agreement=Agreement(peers, {"model": Own(tokenizer="tokenizer")}), cut_over_tokens=0)
    placement = await placer.place(a_request_for("model"), [])
    assert (placement.prefill, placement.decode) == ("p-a", ["d-a"])  # whatever Redis says
    assert store.excluded == [[stranger]]


async def test_where_all_agree_nobody_is_excluded() -> None:
    peers = Peers(clock=lambda: 0.0)
    for state in (on_host("p-a", "prefill"), on_host("d-a", "decode"), a_worker("d-old", "decode")):
        peers.saw(state)
    store = NotingStore(None, peers)
    await Placer(store=store, agreement=Agreement(peers), cut_over_tokens=0).place(a_request_for("model"), [])
    assert store.excluded == [[]]  # release 0.1.0 doesn't say where it is


FOLLOWED = Grammar(text='start: "yes"')
FLEET = [
    a_worker(f"{role}-{age}", role, features=frozenset(Feature if age == "new" else ()))
    for role in ROLES
    for age in ("new", "old")
]


@pytest.mark.parametrize(
    "chosen", [None, ("prefill-old", ["decode-old"]), ("prefill-new", ["decode-old"]), ("decode-old", [])]
)
async def test_a_request_with_a_grammar_goes_to_workers_that_follow_it(chosen: tuple[str, list[str]] | None) -> None:
    """One of release 0.1.0 would ignore it, and its answer be wrong."""
    peers = Peers(clock=lambda: 0.0)
    for state in FLEET:
        peers.saw(state)
    placement = Placement(prefill=chosen[0], decode=chosen[1], reason=Reason.LOAD) if chosen else None
    store = NotingStore(placement, peers)
    placer = Placer(store=store, agreement=Agreement(peers), cut_over_tokens=0)
    found = await placer.place(a_request_for("model", FOLLOWED), [])
    assert (found.prefill, found.decode) == ("prefill-new", ["decode-new"])
    assert store.excluded == [["decode-old", "prefill-old"]]
    free = await placer.place(a_request_for("model"), [])
    assert {"decode-old", "prefill-old"} & {free.prefill, *free.decode}
    assert store.excluded[1] == []


async def test_a_candidate_that_joined_meanwhile_gets_no_grammar_that_it_would_ignore() -> None:
    peers = Peers(clock=lambda: 0.0)
    for state in FLEET:
        if state.features:
            peers.saw(state)
    both = Placement(prefill="prefill-new", decode=["decode-old", "decode-new"], reason=Reason.LOAD)
    store = LateStore(both, peers, [state for state in FLEET if not state.features])
    placer = Placer(store=store, agreement=Agreement(peers), cut_over_tokens=0)
    assert (await placer.place(a_request_for("model", FOLLOWED), [])).decode == ["decode-new"]
    assert (await placer.place(a_request_for("model"), [])).decode == both.decode


async def test_without_a_worker_that_follows_grammars_there_is_no_choice() -> None:
    placer = a_placer(*(state for state in FLEET if state.worker != "decode-new"))
    with pytest.raises(UnavailableError, match="no decode worker that follows grammars is ready"):
        await placer.place(a_request_for("model", FOLLOWED), [])


async def test_typical_p_is_for_workers_that_know_it() -> None:
    placer = a_placer(*FLEET)
    found = a_request_for("model")
    found.spec = dataclasses.replace(found.spec, sampling=SamplingParams(max_tokens=4, typical_p=0.9))
    placement = await placer.place(found, [])
    assert (placement.prefill, placement.decode) == ("prefill-new", ["decode-new"])
    without = a_placer(*(state for state in FLEET if state.worker != "decode-new"))
    with pytest.raises(UnavailableError, match="no decode worker that follows typical_p is ready"):
        await without.place(found, [])


async def test_placement_needs_no_change_for_another_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDED, "made up", lambda work: work.sampling.min_p > 0)
    fleet = [
        a_worker(f"{role}-{age}", role, features=frozenset({"made up"} if age == "new" else Feature))
        for role in ROLES
        for age in ("new", "old")
    ]
    found = a_request_for("model")
    found.spec = dataclasses.replace(found.spec, sampling=SamplingParams(max_tokens=4, min_p=0.1))
    placement = await a_placer(*fleet).place(found, [])
    assert (placement.prefill, placement.decode) == ("prefill-new", ["decode-new"])
    with pytest.raises(UnavailableError, match="no decode worker that follows made up is ready"):
        await a_placer(*(state for state in fleet if state.worker != "decode-new")).place(found, [])


async def test_a_follower_is_the_last_resort_even_after_it_failed() -> None:
    """Nobody else may go on with the answer."""
    placer, state = a_placer(*FLEET), a_request_for("model", FOLLOWED)
    assert placer.decoders(state.spec) == ["decode-new"]
    state.excluded.append("decode-new")
    assert (await placer.place(state, [])).decode == ["decode-new"]


async def test_a_request_with_a_grammar_stays_off_an_island_where_nobody_follows_it() -> None:
    placer = a_placer(
        *(
            on_host(f"{role}-{host}", role, features=frozenset(Feature if host == "b" else ()))
            for role in ROLES
            for host in "ab"
        )
    )
    assert (await placer.place(a_request_for("model", FOLLOWED), [])).prefill == "prefill-b"
