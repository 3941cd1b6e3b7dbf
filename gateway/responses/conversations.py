"""The conversations of all tenants: items in turns, which are numbered and written once.

A turn's number is taken in the conversation's record first. Two gateways that add to a conversation at a time write turns of
different numbers, each of them whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from common import subjects
from common.errors import InvalidRequestError, UnavailableError
from gateway.http.problem import NotKeptError
from gateway.keeping.changing import CHANGE_TRIES
from gateway.keeping.layout import token_of
from gateway.keeping.streams import KeptStreams, Stored
from gateway.responses.records import (
    ConversationRecord,
    Json,
    checked_conversation_id,
    conversation_decoder,
    encode,
    new_conversation_id,
    no_conversation,
    with_ids,
)
from gateway.responses.store import ResponseStore, off_loop

TURN_BYTES = 4 << 20  # one message; NATS carries 8 MiB
_json = msgspec.json.Encoder()
_items = msgspec.json.Decoder(list[Json])


class Conversations:
    """The store of conversations. Every call raises UnavailableError if NATS can't do it now."""

    def __init__(self, store: ResponseStore) -> None:
        self._streams: KeptStreams = store.streams
        self._limits = store.limits
        self._rooms = store.rooms

    async def create(self, tenant: str, metadata: dict[str, str]) -> ConversationRecord:
        """Create a conversation. Raises StoreFullError and OverloadedError."""
        await self._rooms.for_conversation(tenant)
        record = ConversationRecord(
            id=new_conversation_id(), tenant=tenant, created_at=int(time.time()), metadata=metadata
        )
        await self._streams.create(record.subject, encode(record))
        return record

    async def record(self, tenant: str, conversation_id: str) -> ConversationRecord:
        """Raises NotKeptError."""
        return (await self._load(tenant, conversation_id))[0]

    async def describe(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> ConversationRecord:
        """Replace a conversation's metadata. Raises NotKeptError."""
        return await self._change(
            tenant, conversation_id, lambda record: msgspec.structs.replace(record, metadata=metadata)
        )

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises NotKeptError."""
        record = await self.record(tenant, conversation_id)
        await self._streams.purge(subjects.kept_conversation(token_of(tenant), record.id, ">"))
        self._rooms.forget(tenant)

    async def add(self, tenant: str, conversation_id: str, items: Sequence[Json]) -> list[Json]:
        """Append items; return them with their ids. Raises NotKeptError, InvalidRequestError, StoreFullError."""
        before = await self.record(tenant, conversation_id)
        sized = await asyncio.to_thread(_runs, with_ids(items, conversation_id, 0))  # ids have a fixed length
        size = sum(map(len, sized))
        self.check(before, len(items), size)
        await self._rooms.for_turn(tenant, size)

        def grown(record: ConversationRecord) -> ConversationRecord:
            self.check(record, len(items), size)
            return msgspec.structs.replace(
                record,
                turns=record.turns + len(sized),
                items=record.items + len(items),
                bytes=record.bytes + size,
            )

        after = await self._change(tenant, conversation_id, grown)
        numbered = with_ids(items, conversation_id, after.items - len(items))
        for number, run in enumerate(await asyncio.to_thread(_runs, numbered), after.turns - len(sized)):
            await self._streams.create(
                subjects.kept_conversation(token_of(tenant), conversation_id, "turn", number), run
            )
        return numbered

    async def items(self, tenant: str, conversation_id: str) -> list[Json]:
        """A conversation's items, oldest first. Raises NotKeptError."""
        record = await self.record(tenant, conversation_id)
        turns = await self._turns(tenant, conversation_id)
        return await off_loop(record.bytes, _joined, [turn.data for turn in turns])

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> Json:
        """Raises NotKeptError."""
        for item in await self.items(tenant, conversation_id):
            if item["id"] == item_id:
                return item
        raise no_item(item_id)

    async def remove(self, tenant: str, conversation_id: str, item_id: str) -> ConversationRecord:
        """Remove an item. Raises NotKeptError."""
        for _ in range(CHANGE_TRIES):
            turn, rest = await self._without(tenant, conversation_id, item_id)
            if await self._streams.replace(turn.subject, rest, seq=turn.seq):
                shrunk = partial(_shrunk, less=len(turn.data) - len(rest))
                return await self._change(tenant, conversation_id, shrunk)
        raise UnavailableError(f"conversation {conversation_id} is changed all the time: try again")

    async def _without(self, tenant: str, conversation_id: str, item_id: str) -> tuple[Stored, bytes]:
        """The turn that contains an item, and its other items. Raises NotKeptError."""
        await self.record(tenant, conversation_id)
        for turn in await self._turns(tenant, conversation_id):
            items = await off_loop(len(turn.data), _items.decode, turn.data)
            rest = [item for item in items if item["id"] != item_id]
            if len(rest) < len(items):
                return turn, await off_loop(len(turn.data), _json.encode, rest)
        raise no_item(item_id)

    async def _turns(self, tenant: str, conversation_id: str) -> list[Stored]:
        """All turns in order; a replaced one comes late in the stream."""
        subject = subjects.kept_conversation(token_of(tenant), conversation_id, "turn", "*")
        found = {_number(stored): stored async for stored in self._streams.scan(subject)}
        return [found[number] for number in sorted(found)]

    async def _load(self, tenant: str, conversation_id: str) -> tuple[ConversationRecord, int]:
        subject = subjects.kept_conversation(token_of(tenant), checked_conversation_id(conversation_id), "record")
        stored = await self._streams.get(subject)
        if stored is None:
            raise no_conversation(conversation_id)
        return conversation_decoder.decode(stored.data), stored.seq

    async def _change(
        self, tenant: str, conversation_id: str, to: Callable[[ConversationRecord], ConversationRecord]
    ) -> ConversationRecord:
        for _ in range(CHANGE_TRIES):
            record, seq = await self._load(tenant, conversation_id)
            changed = to(record)
            if await self._streams.replace(record.subject, encode(changed), seq=seq):
                return changed
        raise UnavailableError(f"conversation {conversation_id} is changed all the time: try again")

    def check(self, record: ConversationRecord, count: int, num_bytes: int) -> None:
        """Check a conversation's limits. Raises InvalidRequestError beyond them."""
        if record.items + count > self._limits.conversation_items:
            raise InvalidRequestError(
                f"a conversation takes {self._limits.conversation_items} items in all: begin another one",
                param="conversation",
            )
        if record.bytes + num_bytes > self._limits.history_bytes:
            raise InvalidRequestError(
                f"a conversation has room for {self._limits.history_bytes} bytes: begin another one",
                param="conversation",
            )


def no_item(item_id: str) -> NotKeptError:
    return NotKeptError(f"no item {item_id[:100]!r}: it was deleted, has expired, or never was", param="item_id")


def _shrunk(record: ConversationRecord, less: int) -> ConversationRecord:
    return msgspec.structs.replace(record, bytes=record.bytes - less)


def _number(turn: Stored) -> int:
    return int(turn.subject.rpartition(".")[2])


def _joined(turns: Sequence[bytes]) -> list[Json]:
    return [item for turn in turns for item in _items.decode(turn)]


def _runs(items: Sequence[Json]) -> list[bytes]:
    """Split items into turns to write. Raises InvalidRequestError for an item too large for a turn."""
    runs: list[bytearray] = []
    for item in items:
        text = _json.encode(item)
        if len(text) > TURN_BYTES:
            raise InvalidRequestError(
                f"an item has {len(text)} bytes, and a conversation keeps at most {TURN_BYTES} of one: shorten it",
                param="items",
            )
        if runs and len(runs[-1]) + len(text) < TURN_BYTES:
            runs[-1] += b"," + text
        else:
            runs.append(bytearray(b"[" + text))
    return [bytes(run + b"]") for run in runs]
