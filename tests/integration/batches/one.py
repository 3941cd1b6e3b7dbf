"""One gateway's Batch API over a real NATS, whose generations are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import CollectorRegistry

from common import subjects
from common.wire import NatsSettings, Wire
from gateway.answers.start import Answers
from gateway.answers.tokenizer import ChatTokenizer
from gateway.batches.metrics import BatchMetrics
from gateway.batches.pooled import PooledLines
from gateway.batches.records import BatchLimits, BatchRecord
from gateway.batches.runner import LineRunner
from gateway.batches.steps import Steps
from gateway.batches.store import BatchStore, batch_streams
from gateway.dialects import DIALECTS
from gateway.dialects.table import DialectTable
from gateway.keeping import streams
from gateway.observe.metrics import GatewayMetrics
from gateway.request.spec import GenerationSpec
from gateway.tenants.budgets import Budgets, LocalBudgets
from gateway.tenants.tenants import Tenants
from tests.fakes.generations import ScriptedGenerations
from tests.integration.waiting import eventually
from tests.unit.gateway.recorder import Recorder

MODEL = "scripted"
TENANT = "default"
LIMITS = BatchLimits(store_bytes=64 << 20, file_bytes=1 << 20, line_bytes=10_000, concurrency=4)


class One:
    """A gateway's Batch API."""

    def __init__(
        self,
        url: str,
        tokenizer: ChatTokenizer,
        script: Callable[[GenerationSpec], list[int]],
        *,
        limits: BatchLimits = LIMITS,
        tenants: Tenants | None = None,
        budgets: Budgets | None = None,
        model: str = MODEL,
        pooled: PooledLines | None = None,
    ) -> None:
        self.nats, self.wire = NatsSettings(url=url), Wire()
        self.streams = batch_streams(self.wire, limits)
        self.store = BatchStore(self.streams, limits)
        self.generations = ScriptedGenerations(script)
        self.registry = CollectorRegistry()
        self.tracer = Recorder()
        self.answers = Answers(
            generations=self.generations,
            catalogue=self.generations.catalogue(tokenizer, name=model),
            budgets=budgets or LocalBudgets(),
            default_deadline_s=60.0,
        )
        metrics = BatchMetrics([MODEL], GatewayMetrics([MODEL], self.registry))
        self.lines = LineRunner(
            self.store,
            self.answers,
            DialectTable(DIALECTS).batchable,
            tenants or Tenants(),
            metrics,
            pooled=pooled,
            tracer=self.tracer,
        )
        self.steps = Steps(self.store, models_of=lambda _: [MODEL])
        self._loops: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Connect; nobody runs its lines yet."""
        await self.wire.open(self.nats, name="test")
        self.streams.open()

    async def close(self) -> None:
        await self.streams.close()
        await self.wire.leave()

    async def __aenter__(self) -> One:
        await self.open()
        self._loops = [asyncio.create_task(self.lines.run()), asyncio.create_task(self.steps.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.lines.stop()
        await self.steps.stop()
        await asyncio.wait(self._loops, timeout=10 * streams.PULL_S)  # what their last pulls bring goes back at once
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.close()

    async def die(self) -> None:
        """As kill -9 would: nothing is said to anybody."""
        assert self.streams._beating is not None
        self.streams._beating.cancel()
        await self.wire.close()

    def lines_counted(self) -> dict[str, float]:
        found = {state: self.registry.get_sample_value(*_sample(state)) for state in ("completed", "failed", "again")}
        return {state: value or 0.0 for state, value in found.items()}

    async def begin(self, count: int, *, tenant: str = TENANT, **options: object) -> BatchRecord:
        lines = [line_of(number, **options) for number in range(count)]
        return await self.begin_raw(b"".join(json.dumps(line).encode() + b"\n" for line in lines), tenant=tenant)

    async def begin_raw(self, raw: bytes, *, tenant: str = TENANT, endpoint: str = "/v1/completions") -> BatchRecord:
        writer = await self.store.new_file(tenant, len(raw))
        await writer.write(raw)
        file = await writer.finish("in.jsonl")
        return await self.store.new_batch(tenant, input_file_id=file.id, endpoint=endpoint, metadata=None)

    async def end_of(self, batch: BatchRecord) -> BatchRecord:
        async def over() -> BatchRecord | None:
            record = await self.store.batch(batch.tenant, batch.id)
            return record if record.is_over else None

        record = await eventually(over)
        assert record is not None
        return record

    async def entries(self, batch: BatchRecord) -> list[dict[str, Any]]:
        """Of output and error file."""
        found = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                file = await self.store.file(batch.tenant, file_id)
                raw = b"".join([part async for part in self.store.parts(file_id, file.parts)])
                assert len(raw) == file.bytes
                found += [json.loads(line) for line in raw.splitlines()]
        return found


@contextlib.asynccontextmanager
async def unattended(url: str, tokenizer: ChatTokenizer) -> AsyncIterator[One]:
    """A gateway's Batch API whose batches nobody looks after."""
    one = One(url, tokenizer, echo)
    await one.open()
    try:
        yield one
    finally:
        await one.close()


def _sample(state: str) -> tuple[str, dict[str, str]]:
    return "baton_batch_lines_total", {"model_name": MODEL, "state": state}


def line_of(number: int, **options: object) -> dict[str, object]:
    body = {"model": MODEL, "prompt": [40 + number], "max_tokens": 3, "ignore_eos": True} | options
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def echo(spec: GenerationSpec) -> list[int]:
    """The answer tells the question, so that a result can't be another line's."""
    return [spec.token_ids[0]] * spec.sampling.max_tokens


def each_once(entries: list[dict[str, Any]], count: int) -> None:
    assert Counter(entry["custom_id"] for entry in entries) == Counter(f"line {number}" for number in range(count))


async def work_of(one: One, subject: str) -> list[str]:
    info = await one.streams._js.stream_info(subjects.BATCH_WORK_STREAM, subjects_filter=subject)
    return list(info.state.subjects or {})
