"""The door for what HTTP doesn't carry: keys, ids, traces, refusals and counts are those of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from common.errors import OverloadedError, ServingError, WorkerFailedError
from gateway.answers.ask import Ask
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.dialects.table import Entry
from gateway.http.exchange import RequestScope, Way
from gateway.http.problem import UnauthorizedError
from gateway.routes.door import Begun, Door
from gateway.tenants.tenants import Tenants
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, TEXT
from tests.unit.gateway.recorder import Recorder
from tests.unit.gateway.tiny_dialect import SAY, TINY

LIMIT_S = 60
SECRET = "the-key-of-a-tiny-client"
WAY = Way(name="Tiny/Say", operation="say", attributes={"rpc.system": "tiny"}, status="rpc.tiny.status_code")
ENTRY = Entry(dialect=TINY, path=WAY.name, endpoint=TINY.paths.endpoints[SAY])


class House:
    """A door, what is behind it, and what it tells."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.script = ScriptedGenerations(lambda spec: [*tokenizer.encode(TEXT), *tokenizer.eos_ids])
        self.tracer = Recorder()
        app = create_app(
            generations=self.script,
            catalogue=self.script.catalogue(tokenizer),
            settings=HttpSettings(tenants=Tenants(api_keys=[SECRET])),
            tracer=self.tracer,
        )
        self.door: Door = app.state.door

    @contextmanager
    def enter(self, **headers: str) -> Iterator[RequestScope]:
        with self.door.enter(WAY, {"x-tiny-key": SECRET} | headers, TINY.key) as scope:
            yield scope

    async def begin(self, scope: RequestScope, **fields: Any) -> Begun:
        async def read() -> tuple[Any, Ask]:
            return ENTRY.read(msgspec.json.encode({"model": MODEL, "text": "Hello"} | fields))

        begun = await self.door.begin(ENTRY, scope, read)
        assert isinstance(begun, Begun)
        return begun

    def counted(self, name: str) -> float:
        families = self.door.metrics.registry.collect()
        return sum(
            sample.value for family in families for sample in family.samples if name in f"{sample.name}{sample.labels}"
        )


@pytest.fixture
def house(tokenizer: ChatTokenizer) -> House:
    return House(tokenizer)


async def test_an_answer_is_traced_and_counted(house: House) -> None:
    with house.enter(**{"x-request-id": "mine"}) as scope:
        begun = await house.begin(scope, words=3)
        with begun.ending():
            (piece,) = await begun.answer.whole()
    assert (scope.request_id, scope.tenant.name) == ("mine", "default")
    assert TEXT.startswith(piece.text)
    (span,) = house.tracer.spans
    assert (span.name, span.attributes["rpc.system"], span.attributes["gen_ai.usage.output_tokens"]) == (
        "Tiny/Say",
        "tiny",
        3,
    )
    assert house.script.submitted[0].origin.traceparent == span.context
    assert house.counted("baton_dialect_requests_total{'dialect': 'tiny', 'path': 'Tiny/Say'}") == 1
    assert house.counted("vllm:generation_tokens_total") == 3


@pytest.mark.parametrize("key", ["", "another-key"])
def test_nobody_comes_in_without_a_valid_key(house: House, key: str) -> None:
    with (
        pytest.raises(UnauthorizedError, match="a valid API key is needed: send `x-tiny-key: KEY`"),
        house.enter(**{"x-tiny-key": key}),
    ):
        raise AssertionError("it came in")
    assert house.tracer.spans[0].error == "UnauthorizedError"


async def test_a_refusal_is_kept_counted_and_timed(house: House) -> None:
    house.script.refuse = OverloadedError("full")
    with pytest.raises(OverloadedError), house.enter() as scope:
        await house.begin(scope)
    assert house.door.refusals.find(scope.request_id) is not None
    assert house.counted("baton_request_errors_total{'model_name': 'scripted', 'code': 'overloaded'}") == 1
    assert house.counted("baton_refusal_seconds_count") == 1
    with pytest.raises(ServingError), house.enter() as scope:
        await house.begin(scope, no_such=1)
    assert house.counted("baton_refusal_seconds_count") == 1


async def test_who_leaves_before_the_answer_begins_is_counted(house: House) -> None:
    house.script.entrance.clear()

    async def ask() -> None:
        with house.enter() as scope:
            await house.begin(scope)

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(LIMIT_S):
        while not house.script.asked:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert house.counted("client_left") == 1
    assert house.script.running == {}


async def test_who_leaves_an_answer_cancels_it_and_a_failed_one_is_counted_as_such(house: House) -> None:
    house.script.hold_after = 1
    with house.enter() as scope:
        begun = await house.begin(scope)
        with begun.ending():
            pass
    assert len(house.script.cancelled) == 1
    house.script.hold_after, house.script.fail = None, WorkerFailedError("broke")
    with house.enter() as scope:
        begun = await house.begin(scope)
        with pytest.raises(WorkerFailedError), begun.ending():
            await begun.answer.whole()
    assert house.counted("worker_failed") == 1
