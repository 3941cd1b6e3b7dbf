"""Why a prompt waits that is computed where it decodes."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import Grammar, SamplingParams
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from tests.fakes.worker import claim, new_job
from tests.unit.decode.scheduling import BLOCK, make_request
from worker.serving.allocation import sequence_of
from worker.serving.turns import Wait


def waiting_behind_another(*, blocks: int = 100, places: int = 8, budget: int = 100) -> DecodeRequest:
    """The second of two prompts of 32 tokens after the first plan."""
    pool = BlockPool(num_blocks=blocks, block_size=BLOCK)
    scheduler = DecodeScheduler(pool=pool, max_sequences=places, max_model_len=1000)
    first, second = (make_request(name, prompt=32, max_tokens=4, salt=ord(name)) for name in "ab")
    for request in (first, second):
        scheduler.enqueue(request)
    assert scheduler.plan(budget)[0].sequence is first.sequence
    return second


@pytest.mark.parametrize(
    ("bounds", "reason"), [({"blocks": 12}, Wait.ROOM), ({"places": 1}, Wait.PLACE), ({"budget": 16}, Wait.PROMPTS)]
)
def test_it_waits_for_blocks_a_place_or_other_prompts(bounds: dict[str, int], reason: Wait) -> None:
    request = waiting_behind_another(**bounds)
    assert (request.waits.reason, request.started_at) == (reason, 0.0)


def test_a_begun_prompt_waits_no_more() -> None:
    request = waiting_behind_another()
    assert request.started_at
    assert list(request.waits.ms) == [Wait.PROMPTS]


def test_until_the_first_plan_it_waits_for_its_grammar_if_it_has_one() -> None:
    for grammar, reason in ((None, Wait.PROMPTS), (Grammar(allowed=[5]), Wait.GRAMMAR)):
        job = msgspec.structs.replace(new_job("r", [1, 2, 3], SamplingParams(max_tokens=1)), grammar=grammar)
        claimed = claim(job)
        request = DecodeRequest.claimed(claimed, sequence_of(job))
        assert request.waits.reason == reason
        request.waits.note(Wait.ROOM, since=request.began_at, now=claimed.claimed_at + 2.0)
        assert request.waits.ms == {reason: pytest.approx(2000.0)}
