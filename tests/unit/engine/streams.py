"""Streams that the worker's pipeline and scheduler decode, for tests of engines in stages."""

from __future__ import annotations

from benchmarks.engine.workload import Prompts, Workload, driven
from engine.engine import Engine
from worker.device.prompt_budget import PromptBudget


async def decoded(engine: Engine, number: int, *, tokens: int, token_budget: int, stages: int = 1) -> list[list[int]]:
    """All tokens of `number` streams, `tokens` of each behind a prompt of 9."""
    workload = Workload(engine, stages=stages)
    requests = Prompts(vocab_size=engine.vocab_size, seed=3).requests([9] * number, max_tokens=tokens)
    async with driven(engine, workload, budget=PromptBudget(token_budget=token_budget)) as pipeline:
        for request in requests:
            workload.enqueue(request)
        pipeline.wake()
        await workload.finished()
    return [request.sequence.token_ids for request in requests]
