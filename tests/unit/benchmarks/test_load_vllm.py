"""The yardstick of `benchmarks.load`: vLLM's scheduling."""

from __future__ import annotations

from benchmarks.load.cells import Cell, chat
from benchmarks.load.model import serve
from benchmarks.load.vllm import FirstComeScheduler, vllm
from common.messages import Job, SamplingParams
from decode.request import DecodeRequest
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk
from engine.sequence import Sequence


def request(name: str, prompt: int, *, answer: int = 10) -> DecodeRequest:
    sampling = SamplingParams(max_tokens=answer, temperature=0.0)
    job = Job(
        request_id=name, attempt=1, gateway="g", token_ids=b"", num_prompt_tokens=prompt, hash_root=bytes(16),
        sampling=sampling, decode_workers=[], deadline_ms=1000,
    )  # fmt: skip
    first = 1000 * ord(name[0])  # nothing is shared
    sequence = Sequence(
        request_id=name, attempt=1, token_ids=[*range(first, first + prompt)], num_prompt_tokens=prompt,
        sampling=sampling, hash_root=bytes(16),
    )  # fmt: skip
    return DecodeRequest(job=job, sequence=sequence, deadline_at=float("inf"), first_position=0)


def scheduler(*, blocks: int = 100, budget: int = 100) -> FirstComeScheduler:
    return FirstComeScheduler(BlockPool(num_blocks=blocks, block_size=16), token_budget=budget)


def step(scheduler: FirstComeScheduler) -> dict[str, int]:
    """Run one pass; the tokens of each request."""
    chunks: list[Chunk] = scheduler.plan(8192)
    for chunk in chunks:
        landed = scheduler.landed(chunk)
        chunk.sequence.finish(chunk)
        if chunk.sample:
            landed.sequence.append(7)
            if landed.sequence.finish_reason():
                scheduler.remove(landed)
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def test_prompts_are_cut_by_a_fixed_budget_behind_the_streams_and_come_in_their_order() -> None:
    first_come = scheduler()
    for name, prompt in (("a", 30), ("b", 150), ("c", 10)):
        first_come.enqueue(request(name, prompt))
    assert [step(first_come) for _ in range(3)] == [
        {"a": 30, "b": 70},
        {"a": 1, "b": 80, "c": 10},
        dict.fromkeys("abc", 1),
    ]


def test_a_prompt_waits_for_blocks_for_all_of_it_and_so_do_those_behind() -> None:
    first_come = scheduler(blocks=10)
    for name, prompt in (("a", 100), ("b", 150), ("c", 10)):
        first_come.enqueue(request(name, prompt, answer=2))
    assert [step(first_come) for _ in range(3)] == [{"a": 100}, {"a": 1}, {"b": 100}]


def test_the_last_one_gives_its_blocks_and_computes_again_what_is_not_cached() -> None:
    first_come = scheduler(blocks=4)
    for name in "ab":
        first_come.enqueue(request(name, 32, answer=20))
    assert step(first_come) == {"a": 32, "b": 32}
    assert step(first_come) == {"a": 1}  # a third block, of those of b
    assert (first_come.preemptions, len(first_come)) == (1, 2)
    seen = [step(first_come) for _ in range(40)]
    assert len(first_come) == 0
    assert sum("b" in tokens for tokens in seen) == 19  # the first one came before
    assert first_come.preemptions == 1


def test_it_serves_a_load() -> None:
    outcome = serve(Cell("chat", "bf16", chat(8)), vllm(), seconds=4.0)
    assert len(outcome.runs) == 32
    assert outcome.good == 1.0
