"""Placement counts what a sequence takes of a pool as the worker does, also where windows or states have blocks of their own."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from common.messages import KVLayout, Region, SamplingParams, WorkerState
from common.pages import KVGroup, PagePart
from common.peers import Peers
from common.words import Keeps
from engine.cache.block_pool import BlockPool
from engine.cache.pages import layout_of
from engine.config import CacheConfig
from gateway.placement.agreement import Agreement
from gateway.placement.ledger import PlacementRequest, room_for
from gateway.placement.placer import Placer
from gateway.placement.without_redis import choose, loads_of
from gateway.request.placement import Placement, Reason
from gateway.request.spec import GenerationSpec
from gateway.request.state import RequestState
from tests.fakes.workers import LAYOUT, a_worker
from tests.unit.engine.generate import new_sequence
from worker.serving.allocation import admit, cover, grow, publish_computed

KEYS = PagePart(layers=1, planes=2, heads=1, dim=8, dtype="float32")
WINDOW = PagePart(layers=3, planes=2, heads=1, dim=8, dtype="float32", window=50)
CONFIG = CacheConfig(num_blocks=100)
PLAIN = KVLayout.of([KEYS], num_blocks=100, block_size=16)
WINDOWED = layout_of([KEYS, WINDOW], CONFIG, 0)
BLOCK, SEEN = 16, 4  # columns that the first token of a block sees behind itself


def most_held(layout: KVLayout, prompt: int, answer: int) -> int:
    """Blocks that one sequence held at most while a worker decoded it, two passes in flight."""
    pool, most = BlockPool.of(layout), 0
    sequence = new_sequence("a", list(range(prompt)), max_tokens=answer)
    admit(pool, sequence, num_tokens=prompt)
    for num_tokens in (prompt, *[1] * (answer - 1)):
        before = sequence.schedule(cover(pool, sequence, num_tokens) if num_tokens > 1 else 1)
        if sequence.num_generated + sequence.num_pending < answer:
            grow(
                pool, sequence, num_tokens=sequence.num_scheduled + 1
            )  # the next pass is planned before this one lands
        most = max(most, pool.num_used if before.decodes else 0)
        sequence.finish(before)
        publish_computed(pool, sequence)
        sequence.append(1)
    return most


def test_what_is_reserved_is_what_a_worker_takes() -> None:
    for prompt in (1, 15, 16, 17, 40, 100, 300):
        for answer in (2, 16, 17, 40, 90):
            held, reserved = most_held(WINDOWED, prompt, answer), room_for(WINDOWED, prompt + answer)
            assert BLOCK * held <= reserved + BLOCK, (prompt, answer)
            assert reserved <= BLOCK * (held + 2 * (1 + WINDOWED.groups[0].blocks_per_entry)), (prompt, answer)


def test_a_plain_pool_reserves_tokens_and_one_with_states_a_state_besides() -> None:
    state = KVGroup(keeps=Keeps.STATE, parts=(), blocks_per_entry=3, most_entries=1)
    states = msgspec.structs.replace(PLAIN, groups=(state,))
    assert [room_for(layout, 70) for layout in (PLAIN, states)] == [70, 70 + 3 * BLOCK]
    assert room_for(WINDOWED, 20) == 20 + 2 * 3 * BLOCK
    assert room_for(WINDOWED, 5000) == 5000 + (SEEN + 2) * 3 * BLOCK


def decoder(name: str, layout: KVLayout, free_blocks: int) -> WorkerState:
    region = Region(transport="shm", incarnation=1, layout=layout, address={})
    return a_worker(name, "decode", region=region, free_blocks=free_blocks)


class Asked:
    """A ledger that notes what is reserved, and is away."""

    def __init__(self) -> None:
        self.reserved: list[int] = []

    async def place(self, request: PlacementRequest) -> Placement:
        self.reserved.append(request.reserve_tokens)
        return Placement(prefill="d0", decode=[], reason=Reason.LOAD)

    async def release(self, charges: object) -> int:
        return 0


def a_request(tokens: int, answer: int) -> RequestState:
    sampling = SamplingParams(max_tokens=answer)
    spec = GenerationSpec(request_id="r", token_ids=[1] * tokens, sampling=sampling, deadline_s=60)
    return RequestState(spec=spec, deadline_at=1e12)


async def test_the_ledger_is_asked_for_the_windows_too() -> None:
    for layout, expected in ((LAYOUT, 40), (WINDOWED, 40 + 3 * 3 * BLOCK)):
        peers, ledger = Peers(clock=lambda: 0.0), Asked()
        peers.saw(decoder("d0", layout, 100))
        await Placer(store=ledger, agreement=Agreement(peers), cut_over_tokens=0).place(a_request(30, 10), [])
        assert ledger.reserved == [expected]


def test_without_redis_a_worker_whose_room_is_windows_of_others_is_full() -> None:
    """Four requests of 40 tokens take 12 blocks of tokens, and 36 of windows, before any worker has said so."""
    others = []
    for _ in range(4):
        other = a_request(30, 10)
        other.begin_attempt(0.0)
        other.placed("p0", ["d0"])
        others.append(other)
    small = KVLayout.of([KEYS], num_blocks=50, block_size=16)
    for layout, reason in (
        (small, Reason.HEARTBEATS_LOAD),
        (layout_of([KEYS, WINDOW], replace(CONFIG, num_blocks=50), 0), Reason.HEARTBEATS_FULL),
    ):
        states = [a_worker("p0", "prefill"), decoder("d0", layout, 50)]
        placement = choose(
            loads_of(states, others),
            num_tokens=30,
            reserve_tokens=room_for(layout, 40),
            cut_over_tokens=0,
        )
        assert placement.reason is reason
