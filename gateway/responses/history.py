"""The history of a request: the items of stored responses or a conversation, and referenced items."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from common.errors import InvalidRequestError
from gateway.dialects.responses.history import History
from gateway.dialects.responses.items import MAX_ITEMS, CompactionItem, Item, ItemReference, KeptItems, no_item
from gateway.dialects.responses.schema import ResponseRequest
from gateway.http.fields import parse_body
from gateway.http.problem import NotKeptError
from gateway.responses.conversations import Conversations
from gateway.responses.records import (
    Content,
    Json,
    PreviousResponseError,
    ResponseRecord,
    conversation_of,
    owner_of,
    response_of,
)
from gateway.responses.store import ResponseStore, gathered, off_loop

_encode = msgspec.json.Encoder().encode


class _Told(msgspec.Struct):
    """The items in a response object."""

    output: list[msgspec.Raw]


class Histories:
    """The lookup of histories. Every call raises UnavailableError if NATS can't do it now."""

    def __init__(self, store: ResponseStore, conversations: Conversations) -> None:
        self._store = store
        self._conversations = conversations
        self._limits = store.limits

    async def of(self, body: ResponseRequest, tenant: str) -> History:
        """The history of a request. Raises PreviousResponseError, NotKeptError and InvalidRequestError."""
        own = await self._resolved(body.input, tenant)
        stores = body.store is not False
        if body.previous_response_id is not None:
            previous = await self._previous(tenant, body.previous_response_id)
            responses = (*previous.before, previous.id)
            num_bytes = previous.history_bytes + previous.bytes
            self._check_size(num_bytes)
            before = await self._items_of(tenant, responses, num_bytes)
            self._check_count(before, own)
            return History(
                tenant=tenant, before=before, own=own, stores=stores, responses=responses, num_bytes=num_bytes
            )
        if body.conversation is not None:
            before = await self._said(tenant, body.conversation.id, len(own))
            self._check_count(before, own)
            return History(tenant=tenant, before=before, own=own, stores=stores, conversation=body.conversation.id)
        return History(tenant=tenant, own=own, stores=stores)

    async def _previous(self, tenant: str, response_id: str) -> ResponseRecord:
        """Raises PreviousResponseError."""
        try:
            record = await self._store.record(tenant, response_id)
        except NotKeptError as error:
            raise PreviousResponseError(error.message, param="previous_response_id") from None
        if record.conversation:
            why = f"belongs to the conversation {record.conversation}: go on with that"
        elif record.status not in ("completed", "incomplete"):
            why = f"is {record.status}: only one that is completed or incomplete can be gone on from"
        elif len(record.before) >= self._limits.history_responses:
            why = f"goes on from {len(record.before)} others, the most: send the conversation in input"
        else:
            return record
        raise PreviousResponseError(f"the response {record.id} {why}", param="previous_response_id")

    async def _items_of(self, tenant: str, responses: Sequence[str], num_bytes: int) -> list[Item]:
        """Raises PreviousResponseError."""
        try:
            contents = await self._store.history(tenant, responses)
        except NotKeptError as error:
            message = f"what came before it is not there: {error.message}"
            raise PreviousResponseError(message, param="previous_response_id") from None
        return await off_loop(num_bytes, _parsed, contents)

    async def _said(self, tenant: str, conversation_id: str, count: int) -> list[Item]:
        """A conversation's items. Raises NotKeptError; InvalidRequestError if it has no room for `count` more and an answer."""
        record = await self._conversations.record(tenant, conversation_id)
        self._conversations.check(record, count + 1, 0)
        items = await self._conversations.items(tenant, record.id)
        return await off_loop(record.bytes, _checked, items)

    async def _resolved(self, items: Sequence[Item], tenant: str) -> list[Item]:
        """Items with references replaced by stored items. Raises NotKeptError."""
        wanted = {item.id for item in items if isinstance(item, ItemReference)}
        if not wanted:
            return list(items)
        found = await self._referenced(tenant, wanted)
        return [found[item.id] if isinstance(item, ItemReference) else item for item in items]

    async def _referenced(self, tenant: str, wanted: set[str]) -> dict[str, Item]:
        """Raises NotKeptError."""
        owners: dict[str, None] = {}
        for item_id in sorted(wanted):
            owner = owner_of(item_id)
            if owner is None:
                raise no_item(item_id)
            owners[owner] = None
        if len(owners) > self._limits.history_responses:
            raise InvalidRequestError(
                f"input: references to items of {len(owners)} responses, more than {self._limits.history_responses}",
                param="input",
            )
        records = await gathered([partial(self._response, tenant, owner) for owner in owners])
        num_bytes = sum(record.bytes for record in records if record is not None)
        self._check_size(num_bytes)
        contents = await self._store.contents([record for record in records if record is not None])
        items = await off_loop(num_bytes, _listed, contents)
        for owner, record in zip(owners, records, strict=True):
            if record is None:
                items += await self._of_conversation(tenant, owner)
        named = {item["id"]: item for item in items if item["id"] in wanted}
        for item_id in wanted - named.keys():
            raise no_item(item_id)
        checked = await off_loop(num_bytes, _checked, list(named.values()))
        return dict(zip(named, checked, strict=True))

    async def _response(self, tenant: str, owner: str) -> ResponseRecord | None:
        try:
            return await self._store.record(tenant, response_of(owner))
        except NotKeptError:
            return None

    async def _of_conversation(self, tenant: str, owner: str) -> list[Json]:
        try:
            return await self._conversations.items(tenant, conversation_of(owner))
        except NotKeptError:
            return []

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.history_bytes:
            raise InvalidRequestError(
                f"what came before has {num_bytes} bytes, more than {self._limits.history_bytes}: begin anew",
                param="previous_response_id",
            )

    def _check_count(self, before: Sequence[Item], own: Sequence[Item]) -> None:
        if len(before) + len(own) > MAX_ITEMS:
            raise InvalidRequestError(
                f"input: {len(before) + len(own)} items with those before, more than {MAX_ITEMS}: begin anew",
                param="input",
            )


def _arrays(contents: Sequence[Content]) -> bytes:
    """The items of responses, each input before its output, as one JSON array."""
    texts: list[bytes] = []
    for content in contents:
        texts.append(content.input.strip()[1:-1])
        texts += [bytes(item) for item in msgspec.json.decode(content.object, type=_Told).output]
    return b"[" + b",".join(filter(None, texts)) + b"]"


def _listed(contents: Sequence[Content]) -> list[Json]:
    return msgspec.json.decode(_arrays(contents), type=list[Json])


def _parsed(contents: Sequence[Content]) -> list[Item]:
    return _since_compaction(_read(_arrays(contents)))


def _checked(items: Sequence[Json]) -> list[Item]:
    return _since_compaction(_read(_encode(items)))


def _read(array: bytes) -> list[Item]:
    """Raises InvalidRequestError."""
    return parse_body(b'{"input":%b}' % array, KeptItems).input


def _since_compaction(items: list[Item]) -> list[Item]:
    """The items from the last compaction on, which replaces those before."""
    places = [place for place, item in enumerate(items) if isinstance(item, CompactionItem)]
    return items[places[-1] :] if places else items
