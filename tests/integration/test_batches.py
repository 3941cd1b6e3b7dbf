"""Batches over a real NATS by several gateways at a time, whose generations are scripted: who dies or fails is decided here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.types import Message

from common import subjects
from common.bus import NatsSettings
from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    QuarantinedError,
    ServingError,
    UnavailableError,
    WorkerFailedError,
)
from common.servers import run_nats
from common.tracing import Span
from gateway.batches import runner, steps, store, streams
from gateway.batches.metrics import BatchMetrics
from gateway.batches.records import BatchLimits, BatchRecord, FileRecord, encode, first_step, step_decoder, token_of
from gateway.batches.routes import BatchRoutes
from gateway.batches.runner import LineRunner
from gateway.batches.steps import Steps
from gateway.batches.store import BatchStore
from gateway.batches.streams import BatchStreams, Delivery, Stored, StoreFullError
from gateway.budgets import Budgets, Limits, LocalBudgets
from gateway.dialect import Dialect
from gateway.generation import GenerationSpec
from gateway.metrics import GatewayMetrics
from gateway.responses import ConflictError
from gateway.tenants import Tenant, Tenants
from gateway.tokenizer import ChatTokenizer
from tests.fakes.generations import ScriptedGenerations
from tests.integration.waiting import eventually
from tests.models import build_tokenizer

MODEL = "scripted"
TENANT = "default"
LIMITS = BatchLimits(store_bytes=64 << 20, file_bytes=1 << 20, line_bytes=10_000, concurrency=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A server of this module's own: it counts what is in the streams."""
    async with run_nats(data_dir=tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return ChatTokenizer(folder)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that only decide how long a test takes."""
    monkeypatch.setattr(streams, "ACK_WAIT_S", 1.0)
    monkeypatch.setattr(streams, "BEAT_S", 0.2)
    monkeypatch.setattr(steps, "STEP_S", 0.05)
    monkeypatch.setattr(steps, "FAILED_S", 0.1)
    monkeypatch.setattr(runner, "RETRY_S", 0.02)
    monkeypatch.setattr(runner, "LONGEST_DELAY_S", 0.2)
    monkeypatch.setattr(runner, "WATCH_S", 0.1)
    monkeypatch.setattr(runner, "STATUS_FOR_S", 0.1)
    monkeypatch.setattr(runner, "KEEP_RETRY_S", 0.05)


class Recorder:
    """A tracer that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def wants(self, context: str) -> bool:
        return bool(context)

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None: ...


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
    ) -> None:
        self.streams = BatchStreams(NatsSettings(url=url), store_bytes=limits.store_bytes, keep_s=limits.keep_s)
        self.store = BatchStore(self.streams, limits)
        self.generations = ScriptedGenerations(script)
        self.registry = CollectorRegistry()
        self.tracer = Recorder()
        dialect = Dialect(
            generations=self.generations,
            tokenizer=tokenizer,
            budgets=budgets or LocalBudgets(),
            served_model=MODEL,
            default_deadline_s=60.0,
        )
        metrics = BatchMetrics(MODEL, GatewayMetrics(MODEL, self.registry))
        self.lines = LineRunner(self.store, dialect, tenants or Tenants(), metrics, tracer=self.tracer)
        self.steps = Steps(self.store, model=MODEL)
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> One:
        await self.streams.open()
        self._loops = [asyncio.create_task(self.lines.run()), asyncio.create_task(self.steps.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.lines.stop()
        await self.steps.stop()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.streams.close()

    async def die(self) -> None:
        """As kill -9 would: nothing is said to anybody."""
        assert self.streams._beating is not None
        self.streams._beating.cancel()
        await self.streams._client.close()

    def lines_counted(self) -> dict[str, float]:
        found = {state: self.registry.get_sample_value(*_sample(state)) for state in ("completed", "failed", "again")}
        return {state: value or 0.0 for state, value in found.items()}

    async def begin(self, count: int, *, tenant: str = TENANT, **options: object) -> BatchRecord:
        lines = [line_of(number, **options) for number in range(count)]
        return await self.begin_raw(b"".join(json.dumps(line).encode() + b"\n" for line in lines), tenant=tenant)

    async def begin_raw(self, raw: bytes, *, tenant: str = TENANT) -> BatchRecord:
        writer = await self.store.new_file(tenant, len(raw))
        await writer.write(raw)
        file = await writer.finish("in.jsonl")
        return await self.store.new_batch(tenant, input_file_id=file.id, endpoint="/v1/completions", metadata=None)

    async def end_of(self, batch: BatchRecord) -> BatchRecord:
        async def over() -> BatchRecord | None:
            record = await self.store.batch(batch.tenant, batch.id)
            return record if record.is_over else None

        record = await eventually(over, 30.0)
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
    await one.streams.open()
    try:
        yield one
    finally:
        await one.streams.close()


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


async def test_gateways_share_the_lines_and_nothing_is_left_behind(url: str, tokenizer: ChatTokenizer) -> None:
    async with One(url, tokenizer, echo) as first, One(url, tokenizer, echo) as second:
        batch = await first.end_of(await first.begin(300))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 300, 0)
        each_once(await second.entries(batch), 300)
        assert first.generations.submitted
        assert second.generations.submitted
        assert {spec.priority for spec in first.generations.submitted} == {-1}
        assert {spec.tenant.name for spec in first.generations.submitted} == {"default:batch"}
        for subject in (subjects.batch_result, subjects.batch_failure, subjects.batch_start):
            assert await first.streams.count(subject(batch.id, "*")) == 0
        spans = [span for span in first.tracer.spans if span.name.startswith("batch line")]
        assert {span.attributes["baton.batch.id"] for span in spans} == {batch.id}
        assert {span.context for span in spans} == {spec.traceparent for spec in first.generations.submitted}
        assert first.lines_counted()["completed"] + second.lines_counted()["completed"] == 300


async def test_lines_of_a_gateway_that_dies_are_run_by_another(url: str, tokenizer: ChatTokenizer) -> None:
    async with One(url, tokenizer, echo) as dying:
        dying.generations.hold_after = 1
        batch = await dying.begin(20)
        await dying.generations.until(lambda: len(dying.generations.running) == 4)
        await dying.die()
        async with One(url, tokenizer, echo) as other:
            batch = await other.end_of(batch)
            assert (batch.status, batch.completed) == ("completed", 20)
            each_once(await other.entries(batch), 20)


async def test_a_gateway_that_is_told_to_stop_gives_its_lines_back_at_once(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ACK_WAIT_S", 60.0)
    async with One(url, tokenizer, echo) as leaving:
        leaving.generations.hold_after = 1
        batch = await leaving.begin(6)
        await leaving.generations.until(lambda: len(leaving.generations.running) == 4)
    async with One(url, tokenizer, echo) as other:
        batch = await other.end_of(batch)
        assert (batch.status, batch.completed) == ("completed", 6)


async def test_a_line_that_runs_twice_has_one_result(url: str, tokenizer: ChatTokenizer) -> None:
    """A gateway that stood still goes on when another one has done its lines."""
    async with One(url, tokenizer, echo) as slow:
        slow.generations.hold_after = 1
        batch = await slow.begin(4, max_tokens=2)
        await slow.generations.until(lambda: len(slow.generations.running) == 4)
        assert slow.streams._beating is not None
        slow.streams._beating.cancel()  # it stands still
        slow.lines._stopping = slow.steps._stopping = True
        async with One(url, tokenizer, lambda spec: [spec.token_ids[0]]) as other:

            async def all_there() -> bool:
                return await other.streams.count(subjects.batch_result(batch.id, "*")) == 4

            other.steps._stopping = True  # the batch is not ended before the slow one has spoken
            await eventually(all_there)
            slow.generations.release.set()
            await slow.generations.until(lambda: not slow.generations.running)
            await asyncio.gather(*slow.lines._tasks)
            assert slow.lines_counted()["completed"] == 0
        async with One(url, tokenizer, echo) as last:
            batch = await last.end_of(batch)
            entries = await last.entries(batch)
            each_once(entries, 4)
            assert {entry["response"]["body"]["usage"]["completion_tokens"] for entry in entries} == {1}


@pytest.mark.parametrize(
    "refusal", [OverloadedError("full", retry_after_s=0.01), UnavailableError("no worker")], ids=["full", "no worker"]
)
async def test_a_refused_line_comes_again(url: str, tokenizer: ChatTokenizer, refusal: ServingError) -> None:
    async with One(url, tokenizer, echo) as one:
        one.generations.refuse = refusal
        batch = await one.begin(6)

        async def refused() -> bool:
            return one.lines_counted()["again"] > 30  # more often than a line that fails would be tried

        await eventually(refused)
        one.generations.refuse = None
        batch = await one.end_of(batch)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 6, 0)


async def test_a_budget_of_lines_is_not_their_clients_and_they_wait_for_it(url: str, tokenizer: ChatTokenizer) -> None:
    clock = [0.0]
    tenants = Tenants()
    tenants._named = {TENANT: Tenant(limits=Limits(requests_per_minute=3, max_concurrent=1))}
    budgets = LocalBudgets(clock=lambda: clock[0])
    async with One(url, tokenizer, echo, tenants=tenants, budgets=budgets) as one:
        batch = await one.begin(5)

        async def waits() -> bool:
            clock[0] += 0.1
            return one.lines_counted() == {"completed": 3.0, "failed": 0.0, "again": one.lines_counted()["again"]}

        await eventually(waits)
        assert not (await budgets.take(TENANT, Limits(requests_per_minute=3), "a", tokens=1, ttl_s=1)).refused
        clock[0] += 120.0
        assert (await one.end_of(batch)).completed == 5


@pytest.mark.parametrize(
    ("failure", "tries", "status"),
    [
        (WorkerFailedError("broke"), 3, 500),
        (DeadlineExceededError("late"), 3, 504),
        (RuntimeError("a mistake"), 3, 500),
        (QuarantinedError("fells workers"), 1, 500),
        (InvalidRequestError("no"), 1, 400),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_line_that_fails_gets_an_error_after_its_tries(
    url: str, tokenizer: ChatTokenizer, failure: Exception, tries: int, status: int
) -> None:
    async with One(url, tokenizer, echo) as one:
        one.generations.fail = failure
        batch = await one.end_of(await one.begin(2))
        assert (batch.status, batch.completed, batch.failed, batch.output_file_id) == ("completed", 0, 2, None)
        entries = await one.entries(batch)
        each_once(entries, 2)
        assert {entry["response"]["status_code"] for entry in entries} == {status}
        assert len(one.generations.submitted) == 2 * tries


async def test_a_line_that_gateways_die_of_is_given_up(url: str, tokenizer: ChatTokenizer) -> None:
    poison = line_of(0)["body"]["prompt"]  # type: ignore[index]
    deaths, batch = 0, None
    while batch is None or not batch.is_over:
        async with One(url, tokenizer, echo) as one:
            batch = await one.begin(1) if batch is None else batch
            one.generations.hold_after = 0
            began = asyncio.create_task(one.generations.until(lambda: bool(one.generations.submitted)))
            ended = asyncio.create_task(one.end_of(batch))
            await asyncio.wait([began, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                batch = ended.result()
                began.cancel()
                assert not one.generations.submitted
                entries = await one.entries(batch)
            else:
                ended.cancel()
                assert one.generations.submitted[0].token_ids == poison
                deaths += 1
                await one.die()
    assert deaths == runner.DEATHS
    assert [entry["response"]["body"]["error"]["code"] for entry in entries] == ["request_quarantined"]


async def test_a_line_that_comes_to_a_gateway_of_another_model_is_left_to_its_own(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ANOTHER_S", 0.01)
    async with One(url, tokenizer, echo) as other:
        other.lines._dialect.served_model = "another"
        batch = await other.begin(1)

        async def is_refused_often() -> bool:
            lines = other.registry.get_sample_value("baton_batch_lines_total", {"model_name": MODEL, "state": "again"})
            return (lines or 0) > 2 * runner.DEATHS

        await eventually(is_refused_often)
        async with One(url, tokenizer, echo) as own:
            ended = await own.end_of(batch)
    assert (ended.status, ended.completed, ended.failed) == ("completed", 1, 0)


async def test_what_is_not_done_in_time_expires(url: str, tokenizer: ChatTokenizer) -> None:
    limits = BatchLimits(store_bytes=LIMITS.store_bytes, concurrency=3, window_s=1.0)
    async with One(url, tokenizer, echo, limits=limits) as one:
        one.generations.hold_after = 2
        batch = await one.begin(8, max_tokens=2)  # these end before they are held
        assert (await one.end_of(batch)).status == "completed"
        batch = await one.begin(8)
        batch = await one.end_of(batch)
        assert (batch.status, batch.completed, batch.failed, batch.output_file_id) == ("expired", 0, 8, None)
        entries = await one.entries(batch)
        each_once(entries, 8)
        assert {entry["error"]["code"] for entry in entries} == {"batch_expired"}
        await one.generations.until(lambda: not one.generations.running)  # nobody computes for it any more


async def test_batches_take_turns(url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WINDOW", 1)
    async with One(url, tokenizer, echo) as one:
        large = await one.begin(600)
        small = await one.begin(5)
        assert (await one.end_of(small)).status == "completed"
        assert not (await one.store.batch(TENANT, large.id)).is_over
        await one.store.cancel(TENANT, large.id)
        large = await one.end_of(large)
        assert large.completed + large.failed == 600


async def test_bounds_of_a_tenant(url: str, tokenizer: ChatTokenizer) -> None:
    few = BatchLimits(store_bytes=LIMITS.store_bytes, tenant_files=2, tenant_batches=1, tenant_share=1e-5)
    one = One(url, tokenizer, echo, limits=few)
    await one.streams.open()
    try:
        with pytest.raises(StoreFullError, match="bytes are left"):
            await one.store.new_file("small", 1_000)
        batch = await one.begin(1, tenant="small")
        with pytest.raises(OverloadedError, match="not over"):
            await one.store.new_batch(
                "small", input_file_id=batch.input_file_id, endpoint="/v1/completions", metadata=None
            )
        with pytest.raises(ConflictError):
            await one.store.delete_file("small", batch.input_file_id)
        writer = await one.store.new_file("small", 10)
        await writer.write(b"{}\n")
        second: FileRecord = await writer.finish("b")
        with pytest.raises(StoreFullError, match="2 files"):
            await one.store.new_file("small", 10)
        await one.store.delete_file("small", second.id)
        await one.store.new_file("small", 10)
    finally:
        with contextlib.suppress(ServingError):
            await one.store.cancel("small", batch.id)
        await one.streams.close()


async def test_a_tenant_s_share_holds_for_files_that_say_no_length_and_for_many_at_a_time(
    url: str, tokenizer: ChatTokenizer
) -> None:
    one = One(url, tokenizer, echo, limits=replace(LIMITS, tenant_share=1e-3, tenant_files=3))  # 67,108 bytes
    await one.streams.open()
    try:
        at_a_time = [await one.store.new_file("chunks", 0) for _ in range(2)]
        for writer in at_a_time:
            await writer.write(b"x" * 999 + b"\n")
            for _ in range(39):
                await writer.write(b"x" * 999 + b"\n")
        await at_a_time[0].finish("first")
        with pytest.raises(StoreFullError, match="27108 bytes are left"):
            await at_a_time[1].finish("second")
        await at_a_time[1].drop()
        alone = await one.store.new_file("chunks", 0)
        with pytest.raises(StoreFullError, match="27108 bytes are left"):
            await alone.write((b"x" * 99 + b"\n") * 512)  # two parts
        await alone.drop()
        few = [await one.store.new_file("chunks", 1) for _ in range(3)]
        for writer in few[:2]:
            await writer.write(b"x")
            await writer.finish("small")
        await few[2].write(b"x")
        with pytest.raises(StoreFullError, match="3 files"):
            await few[2].finish("small")
        await few[2].drop()
        assert [file.bytes for file in await one.store.files("chunks")] == [40_000, 1, 1]
    finally:
        await one.streams.close()


async def test_a_file_whose_acknowledgement_is_lost_is_there_as_a_whole_or_not_at_all(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unattended(url, tokenizer) as one:
        writer = await one.store.new_file("lost", 3)
        await writer.write(b"{}\n")
        create = one.streams.create

        async def unanswered(subject: str, data: bytes) -> bool:
            kept = await create(subject, data)
            if subject.startswith("baton.batch.file."):
                raise UnavailableError("the answer is lost")
            return kept

        monkeypatch.setattr(one.streams, "create", unanswered)
        with pytest.raises(UnavailableError):
            await writer.finish("a")
        assert len(await one.store.files("lost")) == 1
        await writer.drop()  # as an upload does that ends with an error
        assert await one.store.files("lost") == []
        assert await one.streams.count(subjects.batch_part(writer.id, "*")) == 0


async def test_a_file_that_is_half_deleted_can_be_deleted_again(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unattended(url, tokenizer) as one:
        writer = await one.store.new_file("half", 3)
        await writer.write(b"{}\n")
        file = await writer.finish("a")
        purge, purged = one.streams.purge, 0

        async def away_after_the_first(subject: str) -> None:
            nonlocal purged
            purged += 1
            if purged == 2:
                raise UnavailableError("NATS is away")
            await purge(subject)

        monkeypatch.setattr(one.streams, "purge", away_after_the_first)
        with pytest.raises(UnavailableError):
            await one.store.delete_file("half", file.id)
        await one.store.delete_file("half", file.id)
        assert await one.store.files("half") == []
        assert await one.streams.count(subjects.batch_part(file.id, "*")) == 0


async def test_a_crowd_of_batches_does_not_pass_a_tenant_s_bounds(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = One(url, tokenizer, echo, limits=replace(LIMITS, tenant_batches=2, tenant_kept_batches=3))
    await one.streams.open()  # nobody runs its lines
    try:
        file_id = (await one.begin(1, tenant="crowd")).input_file_id

        def begin() -> Coroutine[Any, Any, BatchRecord]:
            return one.store.new_batch("crowd", input_file_id=file_id, endpoint="/v1/completions", metadata=None)

        crowd = await asyncio.gather(*(begin() for _ in range(10)), return_exceptions=True)
        assert [type(begun) for begun in crowd].count(OverloadedError) == 9
        kept = await one.store.batches("crowd")
        assert len(kept) == 2
        for batch in kept:
            await one.steps.step(first_step(await one.store.cancel("crowd", batch.id)))
        await begin()
        with pytest.raises(OverloadedError, match="3 batches of this API key are kept"):
            await begin()
        monkeypatch.setattr(store, "TURN_S", 0.0)
        await one.store._turns["crowd"].acquire()
        with pytest.raises(OverloadedError, match="begin here"):
            await begin()
    finally:
        await one.streams.close()


async def work_of(one: One, subject: str) -> list[str]:
    info = await one.streams._js.stream_info(subjects.BATCH_WORK_STREAM, subjects_filter=subject)
    return list(info.state.subjects or {})


async def test_a_batch_whose_work_was_lost_can_be_cancelled(url: str, tokenizer: ChatTokenizer) -> None:
    """Its record was written when its step had been dropped as one without a batch."""
    one = One(url, tokenizer, echo)
    await one.streams.open()
    batch = await one.begin(1)
    await one.streams.purge(subjects.batch_step(batch.id), stream=subjects.BATCH_WORK_STREAM)
    assert await work_of(one, subjects.batch_step(batch.id)) == []
    await one.store.cancel(TENANT, batch.id)
    assert await work_of(one, subjects.batch_step(batch.id)) == [subjects.batch_step(batch.id)]
    await one.streams.close()
    async with One(url, tokenizer, echo) as other:
        assert (await other.end_of(batch)).status == "cancelled"


async def test_a_batch_that_only_another_release_can_read_is_left_to_it(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = One(url, tokenizer, echo)
    await one.streams.open()
    batch = await one.begin(1)
    later = msgspec.msgpack.encode(msgspec.to_builtins(batch) | {"status": "paused"})
    await one.streams.put(batch.subject, later)
    step = next(
        found for found in await one.streams.fetch("step", 100) if step_decoder.decode(found.data).batch == batch.id
    )
    monkeypatch.setattr(steps, "FAILED_S", 0.0)
    await one.steps._take(step)
    assert await work_of(one, subjects.batch_step(batch.id)) == [subjects.batch_step(batch.id)]
    await one.streams.put(batch.subject, encode(batch))
    await one.streams.close()
    async with One(url, tokenizer, echo) as other:
        assert (await other.end_of(batch)).status == "completed"


async def test_a_list_goes_on_without_what_only_another_release_can_read(url: str, tokenizer: ChatTokenizer) -> None:
    async with unattended(url, tokenizer) as one:
        here, there = await one.begin(1, tenant="listing"), await one.begin(1, tenant="listing")
        await one.streams.put(there.subject, msgspec.msgpack.encode(msgspec.to_builtins(there) | {"status": "paused"}))
        assert [batch.id for batch in await one.store.batches("listing")] == [here.id]
        files = await one.store.files("listing")
        unreadable = subjects.batch_file(token_of("listing"), files[0].id)
        await one.streams.put(unreadable, b"\xc1")
        assert [file.id for file in await one.store.files("listing")] == [file.id for file in files[1:]]


async def test_the_head_of_a_file_reads_none_of_it(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tenant = One(url, tokenizer, echo), Tenant(name="head")
    await one.streams.open()
    writer = await one.store.new_file("head", 0)
    await writer.write(b"{}\n" * 1000)
    file = await writer.finish("a")
    part, read, sent = one.store.part, [], []

    async def counted(file_id: str, number: int) -> bytes:
        read.append(number)
        return await part(file_id, number)

    async def send(message: Message) -> None:
        sent.append(message)

    monkeypatch.setattr(one.store, "part", counted)
    for method, parts, size in (("HEAD", [], 0), ("GET", [0, 1, 2, 3], 3000)):
        scope = {"type": "http", "method": method, "path_params": {"file_id": file.id}, "tenant": tenant, "headers": []}
        answer = await BatchRoutes(one.store).content(Request(scope))
        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        assert read == parts
        assert answer.headers["content-length"] == "3000"
        assert sum(len(message.get("body", b"")) for message in sent) == size
    await one.streams.close()


async def test_a_batch_that_changes_while_all_are_read_is_listed_once(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PAGE", 1)
    async with unattended(url, tokenizer) as one:
        first = await one.begin(1, tenant="changing")
        second = await one.begin(1, tenant="changing")
        read, cancelled = one.streams._read, False

        async def read_and_cancel(subject: str, *, after: int, limit: int) -> list[Stored]:
            nonlocal cancelled
            page = await read(subject, after=after, limit=limit)
            if not cancelled:
                cancelled = True
                await one.store.cancel("changing", first.id)
            return page

        monkeypatch.setattr(one.streams, "_read", read_and_cancel)
        listed = [(batch.id, batch.status) for batch in await one.store.batches("changing")]
        assert sorted(listed) == sorted([(first.id, "cancelling"), (second.id, "validating")])


async def test_large_results_are_read_a_few_at_a_time(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PAGE_BYTES", 100_000)
    async with unattended(url, tokenizer) as one:
        for number in range(10):
            await one.streams.create(subjects.batch_result("large", number), b"%d" % number + b"x" * 60_000)
        every = subjects.batch_result("large", "*")
        assert len(await one.streams._read(every, after=0, limit=streams.PAGE)) < 5
        assert [stored.data[:1] async for stored in one.streams.scan(every)] == [b"%d" % n for n in range(10)]
        await one.streams.purge(every)


async def test_a_part_that_is_queued_twice_is_computed_once(url: str, tokenizer: ChatTokenizer) -> None:
    """Two gateways took the same step: one of them queues lines that are done."""
    lines = [line_of(number, max_tokens=5 if number == 4 else 2) for number in range(5)]
    async with One(url, tokenizer, echo) as one:
        one.generations.hold_after = 2  # the last line waits there
        batch = await one.begin_raw(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

        async def last_is_left() -> bool:
            return await work_of(one, subjects.batch_line(batch.id, "*")) == [subjects.batch_line(batch.id, 4)]

        await one.generations.until(lambda: len(one.generations.submitted) == 5)
        await eventually(last_is_left)
        before = msgspec.structs.replace(await one.store.batch(TENANT, batch.id), queued=0, queued_parts=0)
        await asyncio.gather(*(one.steps._queue_line(before, place) for place in range(5)))
        await eventually(last_is_left)
        one.generations.release.set()
        batch = await one.end_of(batch)
        assert (batch.status, batch.completed) == ("completed", 5)
        assert len(one.generations.submitted) == 5


async def test_lines_that_are_brought_when_a_gateway_stops_are_left_to_others(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PULL_S", 10.0)
    monkeypatch.setattr(streams, "ACK_WAIT_S", 60.0)
    leaving, pulls = One(url, tokenizer, echo), asyncio.Event()
    fetch = leaving.streams.fetch

    async def told(kind: str, number: int) -> list[Delivery]:
        if kind == "line":
            pulls.set()
        return await fetch(kind, number)

    monkeypatch.setattr(leaving.streams, "fetch", told)
    async with leaving:
        await pulls.wait()
        await leaving.lines.stop()
        batch = await leaving.begin(2)
        await leaving._loops[0]  # the pull that was on its way brings them
        await asyncio.gather(*leaving.lines._tasks)
        assert leaving.generations.submitted == []
    async with One(url, tokenizer, echo) as other:
        assert (await other.end_of(batch)).completed == 2


async def test_a_full_store_refuses_files_and_keeps_what_it_has(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    limits = BatchLimits(store_bytes=200_000, tenant_share=1.0)
    async with run_nats(data_dir=tmp_path / "nats") as server:
        async with One(server.url, tokenizer, echo, limits=limits) as one:
            batch = await one.end_of(await one.begin(5))
            writer = await one.store.new_file(TENANT, 0)  # it says no length
            await writer.write(b"x" * 150_000)
            with pytest.raises(StoreFullError, match="bytes are left"):
                await writer.finish("large")
            with pytest.raises(StoreFullError, match="maximum bytes"):
                await one.streams.create(subjects.batch_part("file-large", 0), b"x" * 250_000)
            with pytest.raises(StoreFullError, match="room for results"):
                await one.store.new_file(TENANT, 150_000)
            each_once(await one.entries(batch), 5)


async def test_what_nats_cannot_carry_is_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """A server that is not configured by us, with its max_payload of 1 MiB or less."""
    async with run_nats(data_dir=tmp_path / "nats", extra="max_payload: 4096\n") as server:
        async with One(server.url, tokenizer, echo) as one:
            writer = await one.store.new_file(TENANT, 0)
            await writer.write(b"x" * 5_000)
            with pytest.raises(InvalidRequestError, match="max_payload"):
                await writer.finish("large")
            batch = await one.end_of(await one.begin(2, max_tokens=200, logprobs=20))
            assert (batch.status, batch.failed) == ("completed", 2)
            told = [entry["response"]["body"]["error"]["message"] for entry in await one.entries(batch)]
            assert all("max_payload" in message for message in told)
