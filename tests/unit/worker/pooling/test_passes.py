"""Passes answer whatever happens to them: an input that fails fails alone, and a lost device ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from common.blocks import pack_tokens
from common.messages import Pool, Pooled
from common.tracing import Tracer
from engine.pooling.engine import PoolingInput
from modelfiles.pooling import Pooling
from tests.fakes.bus import MemoryBus
from tests.unit.gateway.recorder import Recorder
from worker.identity import Identity
from worker.pooling.passes import Passes
from worker.pooling.pooler import Pooler, PoolerSettings
from worker.settings import ModelIdentity

BAD, LOST, SLOW = 7, 8, 9
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Device:
    """Computes an input's first token; some tokens are too much for it."""

    fingerprint, vocab_size, max_model_len, pooling = "f", 50, 16, Pooling(size=1, max_len=16)
    found: Sequence[int] = ()

    def __init__(self, *, finds: bool = False) -> None:
        """`finds`: so many tokens of an input as the first one's number."""
        self.go_on, self._finds = threading.Event(), finds

    def compute(self, inputs: Sequence[PoolingInput]) -> list[torch.Tensor]:
        first = {one.tokens[0] for one in inputs}
        self.found = [one.tokens[0] for one in inputs] if self._finds else ()
        if BAD in first:
            raise IndexError("index out of range")
        if LOST in first:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
        if SLOW in first:
            self.go_on.wait(60)
        return [torch.tensor([[float(one.tokens[0])]]) for one in inputs]


def asking(*tokens: int, length: int = 1) -> Pool:
    inputs = [pack_tokens([token] * length) for token in tokens]
    return Pool(request_id="r", remaining_ms=60_000, inputs=inputs, traceparent=CLIENT)


@contextlib.asynccontextmanager
async def computing(passes: Passes) -> AsyncIterator[Passes]:
    running = asyncio.create_task(passes.run())
    try:
        yield passes
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def values(answer: Pooled) -> list[float]:
    return torch.frombuffer(bytearray(answer.values), dtype=torch.float32).tolist()


async def test_an_input_that_fails_fails_alone_whatever_is_raised() -> None:
    async with computing(Passes(Device(), max_batch_tokens=100)) as passes:
        asked = [asyncio.create_task(passes.answer(asking(*own))) for own in ((1, 2), (3, BAD), (4,))]
        good, bad, other = await asyncio.gather(*asked)
        assert (values(good), values(other)) == ([1, 2], [4])
        assert (bad.code, bad.values) == ("step_failed", b"")
        assert values(await passes.answer(asking(5))) == [5]
        assert (passes.answering, passes.broken(60)) == (0, "")


async def test_tokens_that_others_had_computed_are_counted_for_who_asked() -> None:
    device = Device(finds=True)
    spans, stopping = Recorder(), asyncio.Event()
    worker = pooler(device, asyncio.Event(), step_timeout_s=300, tracer=spans)
    asked = [asyncio.create_task(worker.handle(asking(*own, length=5))) for own in ((1, 2), (4,))]
    while worker.state().queued_tokens != 15:
        await asyncio.sleep(0)
    running = asyncio.create_task(worker.run(stopping))
    first, second = await asyncio.gather(*asked)
    assert isinstance(first, Pooled)
    assert isinstance(second, Pooled)
    assert (first.cached_tokens, second.cached_tokens) == (3, 4)
    totals = worker.state().totals
    assert (totals.prompt_tokens, totals.cached_tokens) == (15, 7)
    told = [span.attributes for span in spans.spans if span.name == "pool"]
    assert {(each["baton.cached_tokens"], each["baton.computed_tokens"]) for each in told} == {(3, 7), (4, 1)}
    stopping.set()
    await running


def pooler(device: Device, ended: asyncio.Event, *, step_timeout_s: float, tracer: Tracer | None = None) -> Pooler:
    settings = PoolerSettings(
        served=ModelIdentity("m", tokenizer_fingerprint="t"),
        max_batch_tokens=100,
        step_timeout_s=step_timeout_s,
        drain_s=60,
    )
    return Pooler(
        bus=MemoryBus(),  # type: ignore[arg-type]
        identity=Identity("w", 1),
        engine=device,
        settings=settings,
        end_process=ended.set,
        tracer=tracer,
    )


@pytest.mark.parametrize(("token", "step_timeout_s"), [(LOST, 300.0), (SLOW, 0.0)], ids=["lost", "hanging"])
async def test_a_broken_device_ends_the_process(token: int, step_timeout_s: float) -> None:
    device, ended, stopping = Device(), asyncio.Event(), asyncio.Event()
    worker = pooler(device, ended, step_timeout_s=step_timeout_s)
    running = asyncio.create_task(worker.run(stopping))
    asked = asyncio.create_task(worker.handle(asking(token)))
    await asyncio.wait_for(ended.wait(), 60)
    device.go_on.set()
    await asked
    stopping.set()
    await running


async def test_who_asked_is_answered_before_the_worker_ends() -> None:
    device, stopping = Device(), asyncio.Event()
    worker = pooler(device, asyncio.Event(), step_timeout_s=300)
    running = asyncio.create_task(worker.run(stopping))
    asked = asyncio.create_task(worker.handle(asking(SLOW)))
    while not worker.state().running:
        await asyncio.sleep(0)
    stopping.set()
    while worker.state().status != "draining":
        await asyncio.sleep(0)
    assert isinstance(late := await worker.handle(asking(1)), Pooled)
    assert late.code == "unavailable"
    device.go_on.set()
    await running
    assert isinstance(answer := asked.result(), Pooled)
    assert values(answer) == [SLOW]
