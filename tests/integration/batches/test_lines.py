"""Lines of batches over a real NATS by several gateways at a time, whose generations are scripted."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from common import subjects
from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    QuarantinedError,
    ServingError,
    UnavailableError,
    WorkerFailedError,
)
from gateway.answers.catalogue import Catalogue
from gateway.answers.tokenizer import ChatTokenizer
from gateway.batches import runner
from gateway.keeping import streams
from gateway.keeping.streams import Delivery
from gateway.tenants.budgets import Limits, LocalBudgets
from gateway.tenants.shares import Share
from gateway.tenants.tenants import Tenant, Tenants
from tests.fakes.generations import ScriptedWorkers
from tests.integration.batches.one import MODEL, TENANT, One, each_once, echo, line_of, work_of
from tests.integration.waiting import LIMIT_S, eventually


async def test_gateways_share_the_lines_and_nothing_is_left_behind(url: str, tokenizer: ChatTokenizer) -> None:
    async with One(url, tokenizer, echo) as first, One(url, tokenizer, echo) as second:
        batch = await first.end_of(await first.begin(300))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 300, 0)
        each_once(await second.entries(batch), 300)
        assert first.generations.submitted
        assert second.generations.submitted
        assert {spec.priority for spec in first.generations.submitted} == {-1}
        assert {spec.origin.tenant.name for spec in first.generations.submitted} == {"default:batch"}
        for subject in (subjects.batch_result, subjects.batch_failure, subjects.batch_start):
            assert await first.streams.count(subject(batch.id, "*")) == 0
        spans = [span for span in first.tracer.spans if span.name.startswith("batch line")]
        assert {span.attributes["baton.batch.id"] for span in spans} == {batch.id}
        assert {span.context for span in spans} == {spec.origin.traceparent for spec in first.generations.submitted}
        assert first.lines_counted()["completed"] + second.lines_counted()["completed"] == 300


@pytest.mark.usefixtures("soon_missed")
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
    monkeypatch.setattr(streams, "ACK_WAIT_S", 10 * LIMIT_S)
    async with One(url, tokenizer, echo) as leaving:
        leaving.generations.hold_after = 1
        batch = await leaving.begin(6)
        await leaving.generations.until(lambda: len(leaving.generations.running) == 4)
    async with One(url, tokenizer, echo) as other:
        batch = await other.end_of(batch)
        assert (batch.status, batch.completed) == ("completed", 6)


@pytest.mark.usefixtures("soon_missed")
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


@pytest.mark.usefixtures("soon_missed")
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
    assert deaths == runner.MAX_GATEWAY_DEATHS
    assert [entry["response"]["body"]["error"]["code"] for entry in entries] == ["request_quarantined"]


async def test_a_line_that_comes_to_a_gateway_of_another_model_is_left_to_its_own(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OTHER_MODEL_RETRY_S", 0.01)
    async with One(url, tokenizer, echo, model="another") as other:
        batch = await other.begin(1)

        async def is_refused_often() -> bool:
            lines = other.registry.get_sample_value("baton_batch_lines_total", {"model_name": MODEL, "state": "again"})
            return (lines or 0) > 2 * runner.MAX_GATEWAY_DEATHS

        await eventually(is_refused_often)
        async with One(url, tokenizer, echo) as own:
            ended = await own.end_of(batch)
    assert (ended.status, ended.completed, ended.failed) == ("completed", 1, 0)


async def test_lines_of_a_tenant_with_a_rule_have_the_model_of_its_alias(url: str, tokenizer: ChatTokenizer) -> None:
    shares = (Share(model=MODEL, percent=100.0), Share(model="canary", tenant=TENANT))
    lines = [line_of(number, model="chat") for number in range(3)]
    one = One(url, tokenizer, echo)
    catalogue = Catalogue(
        {MODEL: tokenizer, "canary": tokenizer}, ScriptedWorkers(one.generations), aliases={"chat": shares}
    )
    one.answers.catalogue, one.steps._models_of = catalogue, lambda _: catalogue
    async with one:
        batch = await one.end_of(await one.begin_raw(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
        assert (batch.status, batch.completed) == ("completed", 3)
        assert {spec.model for spec in one.generations.submitted} == {"canary"}


async def test_a_line_may_have_fields_of_other_servers(url: str, tokenizer: ChatTokenizer) -> None:
    lines = [line_of(0, max_tokens=None, n_predict=2, cache_prompt=True), line_of(1, lora_path="x")]
    async with One(url, tokenizer, echo) as one:
        batch = await one.end_of(await one.begin_raw(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 1)
        assert [spec.sampling.max_tokens for spec in one.generations.submitted] == [2]


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
    monkeypatch.setattr(streams, "PULL_S", 1.0)
    monkeypatch.setattr(streams, "ACK_WAIT_S", 5.0)  # one of them may come to a pull that has ended
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


class Vectors:
    """Answers lines of embeddings with their own text, once it is ready."""

    endpoints, names = ("/v1/embeddings",), (MODEL,)

    def __init__(self) -> None:
        self.is_ready = False

    async def answer(self, endpoint: str, raw: bytes, **_: object) -> dict[str, object]:
        return {"data": json.loads(raw)["input"]}


@pytest.mark.parametrize("waits", ["chat", "pool"])
async def test_lines_are_run_while_a_worker_of_either_kind_is_ready(
    url: str, tokenizer: ChatTokenizer, waits: str
) -> None:
    vectors = Vectors()
    async with One(url, tokenizer, echo, pooled=vectors) as one:
        one.generations.not_ready_reason = "no worker is ready"
        assert not one.lines.is_ready
        if waits == "chat":
            line = line_of(0) | {"url": "/v1/embeddings", "body": {"model": MODEL, "input": "a"}}
            begun = await one.begin_raw(json.dumps(line).encode() + b"\n", endpoint="/v1/embeddings")
            vectors.is_ready = True
        else:
            begun = await one.begin(1)
            one.generations.not_ready_reason = ""
        assert one.lines.is_ready
        batch = await one.end_of(begun)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 0)
        assert one.lines_counted()["again"] == 0
