"""The memory of POST /v1/responses: history before an answer, storage after it, background answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response

from common.errors import InvalidRequestError, ServingError, text_of
from gateway.answers.ask import Ask
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.dialects.dialect import Events as Writing
from gateway.dialects.responses.events import ResponseEvents, encoded, queued
from gateway.dialects.responses.history import History
from gateway.dialects.responses.objects import QUEUED, Head, response_object
from gateway.dialects.responses.output import Event
from gateway.dialects.responses.respond import Respond
from gateway.dialects.responses.schema import ResponseRequest
from gateway.http.fields import ignored_header
from gateway.http.problem import json_response
from gateway.http.streaming import ByteStream
from gateway.responses.conversations import Conversations
from gateway.responses.history import Histories
from gateway.responses.metrics import KeptMetrics
from gateway.responses.records import (
    END_OF_EVENT,
    FIRST_INPUT,
    Content,
    Events,
    Json,
    ResponseRecord,
    new_response_id,
    with_ids,
)
from gateway.responses.store import ResponseStore, off_loop

log = logging.getLogger("baton.responses")
KEEP_TIMEOUT_S = 10.0
_encode = msgspec.json.Encoder().encode


class Memory:
    """Fulfils `gateway.dialects.dialect.Memory`."""

    def __init__(
        self, store: ResponseStore, conversations: Conversations, answers: Answers, metrics: KeptMetrics
    ) -> None:
        self._store = store
        self._conversations = conversations
        self._histories = Histories(store, conversations)
        self._answers = answers
        self._metrics = metrics
        self._respond = Respond()

    async def recall(self, body: ResponseRequest, raw: bytes, asked: Asked) -> tuple[ResponseRequest, Ask] | Response:
        """Resolve the history of a body; or return a background response's object. Raises ServingError."""
        found, ask = await self.recalled(body, asked.tenant.name, len(raw))
        if not body.background:
            return found, ask
        return await self._begin(found, ask, raw)

    async def recalled(self, body: ResponseRequest, tenant: str, num_bytes: int) -> tuple[ResponseRequest, Ask]:
        """Raises ServingError."""
        history = await self._histories.of(body, tenant)
        found = body.recalled(history)
        return found, await off_loop(num_bytes + history.num_bytes, self._respond.ask, found)

    async def keep(self, body: ResponseRequest, told: Json) -> Json:
        """Store a response; return the object, which tells if it is stored. Raises ServingError if its conversation is over."""
        history = body.history
        if not history.stores and not history.conversation:
            return told
        content = await asyncio.to_thread(_content, history, told)
        await self.add_to_conversation(history, content, told)
        if not history.stores:
            return told
        record = _record(history, told)
        try:
            async with asyncio.timeout(KEEP_TIMEOUT_S):
                await self._store.keep(record, content)
        except (ServingError, TimeoutError) as error:  # the answer is complete all the same
            log.warning("responses.not_kept", extra={"response": record.id, "error": text_of(error)})
            self._metrics.kept("not_kept")
            return told | {"store": False}
        self._metrics.kept("kept")
        return told

    async def keep_streamed(self, body: ResponseRequest, events: Writing) -> None:
        """Store a streamed response before the stream ends. Raises as `keep`."""
        assert isinstance(events, ResponseEvents)
        making = events.making
        told = await self.keep(body, making.ended())
        if not told["store"]:
            making.not_kept()

    async def add_to_conversation(self, history: History, content: Content, told: Json) -> None:
        """Raises ServingError."""
        if history.conversation:
            items = await off_loop(len(content.input), msgspec.json.decode, content.input)
            await self._conversations.add(history.tenant, history.conversation, [*items, *told["output"]])

    async def _begin(self, body: ResponseRequest, ask: Ask, raw: bytes) -> Response:
        """Raises ServingError."""
        if body.store is False:
            raise InvalidRequestError("background: needs store, or nobody could ask for the answer", param="background")
        head = Head(id=new_response_id(), created_at=int(time.time()), model=self._answers.find(ask.model).name)
        told = response_object(head, body.echoed, status=QUEUED)
        content = msgspec.structs.replace(await asyncio.to_thread(_content, body.history, told), body=raw)
        record = _record(body.history, told, is_background=True, keeps_events=bool(body.stream))
        if record.keeps_events:
            await self._store.add_events(record, 0, Events(first=0, data=queued(told)))
        try:
            record = await self._store.keep(record, content)
        except BaseException:
            await self._store.drop(record)
            raise
        if not record.keeps_events:
            return json_response(told, headers=ignored_header(body))
        return self.stream(record, after=-1, headers=ignored_header(body))

    def stream(self, record: ResponseRecord, *, after: int, headers: dict[str, str] | None = None) -> Response:
        """A background response's events after a number, including future ones."""
        return ByteStream(self._followed(record, after), close=_nothing_to_close, headers=headers or {})

    async def _followed(self, record: ResponseRecord, after: int) -> AsyncGenerator[bytes, None]:
        number = 0  # number of the next event
        async for found in self._store.follow(record):
            if isinstance(found, Events):
                number = found.first + found.data.count(END_OF_EVENT)
                if data := found.behind(after):
                    yield data
            elif found.status != "cancelled" and number > after:
                content = await self._store.content(found)
                told = await off_loop(found.bytes, msgspec.json.decode, content.object)
                yield encoded(Event(f"response.{found.status}", {"response": told}), number)


async def _nothing_to_close() -> None: ...


def _content(history: History, told: Json) -> Content:
    items = with_ids([item.told() for item in history.own], told["id"], FIRST_INPUT)
    return Content(input=_encode(items), object=_encode(told))


def _record(history: History, told: Json, *, is_background: bool = False, keeps_events: bool = False) -> ResponseRecord:
    return ResponseRecord(
        id=told["id"],
        tenant=history.tenant,
        status=told["status"],
        created_at=told["created_at"],
        before=list(history.responses),
        conversation=history.conversation,
        history_bytes=history.num_bytes,
        is_background=is_background,
        keeps_events=keeps_events,
    )
