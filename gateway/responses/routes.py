"""The routes of stored responses and conversations, in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec
from fastapi import Request, Response

from common.errors import InvalidRequestError
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.exchange import request_scope
from gateway.http.problem import Content as Answered
from gateway.http.problem import answer_of, json_response
from gateway.keeping.paging import check_query, listed, page_asked
from gateway.responses.bodies import ConversationRequest, DescribeRequest, ItemsRequest, told_items
from gateway.responses.conversations import Conversations
from gateway.responses.memory import Memory
from gateway.responses.openapi import RESPONSES_API
from gateway.responses.records import Content, Json, ResponseRecord
from gateway.responses.store import ResponseStore, off_loop

ITEMS_PAGE = (20, 100)  # entries of a list: default, maximum
INCLUDE = ("include", "include[]")  # accepted: everything stored is returned
RESPONSE, CONVERSATIONS = "/v1/responses/{response_id}", "/v1/conversations"
CONVERSATION = f"{CONVERSATIONS}/{{conversation_id}}"
ITEMS = f"{CONVERSATION}/items"
ITEM = f"{ITEMS}/{{item_id}}"


class KeptRoutes:
    """The routes. `cancelled` is called for a response that is no longer wanted."""

    def __init__(
        self,
        store: ResponseStore,
        conversations: Conversations,
        memory: Memory,
        body_limits: BodyLimits,
        cancelled: Callable[[str], None],
    ) -> None:
        self._store = store
        self._conversations = conversations
        self._memory = memory
        self._body_limits = body_limits
        self._cancelled = cancelled
        self.routes = Routes(
            gets={
                RESPONSE: self.response,
                f"{RESPONSE}/input_items": self.input_items,
                CONVERSATION: self.conversation,
                ITEMS: self.items,
                ITEM: self.item,
            },
            posts={
                f"{RESPONSE}/cancel": self.cancel,
                CONVERSATIONS: self.create,
                CONVERSATION: self.describe,
                ITEMS: self.add_items,
            },
            deletes={RESPONSE: self.delete, CONVERSATION: self.delete_conversation, ITEM: self.delete_item},
            api=RESPONSES_API,
        )

    # -- responses -----------------------------------------------------------------------------------------------------

    async def response(self, request: Request) -> Response:
        """A response in its present state, or the events of a background one."""
        query = request.query_params
        check_query(query, {"stream", "starting_after", "include_obfuscation", *INCLUDE})
        record = await self._store.record(_tenant(request), request.path_params["response_id"])
        if not _is_true(query, "stream"):
            if "starting_after" in query:
                raise InvalidRequestError("starting_after: only with stream=true", param="starting_after")
            return await self._shown(record)
        after = _number(query, "starting_after")
        if not record.keeps_events:
            raise InvalidRequestError(
                "stream: only a response that was asked for with background and stream can be streamed again",
                param="stream",
            )
        return self._memory.stream(record, after=after)

    async def input_items(self, request: Request) -> Response:
        """List a request's own input items, without its history."""
        page = page_asked(request.query_params, default=ITEMS_PAGE[0], most=ITEMS_PAGE[1], others=INCLUDE)
        _, content = await self._store.whole(_tenant(request), request.path_params["response_id"])
        items: list[Json] = await off_loop(len(content.input), msgspec.json.decode, content.input)
        found, more = page.of(items, _id_of)
        return json_response(listed(found, has_more=more))

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response. A finished one stays as it is."""

        def cancelled(record: ResponseRecord) -> ResponseRecord:
            if not record.is_background:
                raise InvalidRequestError("only a response that was asked for with background can be cancelled")
            return record if record.is_over else record.to("cancelled")

        record = await self._store.change(_tenant(request), request.path_params["response_id"], cancelled)
        self._cancelled(record.id)
        return await self._shown(record)

    async def delete(self, request: Request) -> Response:
        """Delete a response. Responses that continue it can't be continued further."""
        response_id = request.path_params["response_id"]
        await self._store.delete(_tenant(request), response_id)
        self._cancelled(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _shown(self, record: ResponseRecord) -> Response:
        content = await self._store.content(record)
        if record.content == 0 and record.is_background:
            return answer_of(Answered(body=await off_loop(record.bytes, _with_status, record, content)))
        return answer_of(Answered(body=content.object))

    # -- conversations -------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """Create a conversation, optionally with items."""
        body = await read_fields(request, self._body_limits, ConversationRequest, default=b"{}")
        items = await asyncio.to_thread(told_items, body.items or [])
        record = await self._conversations.create(_tenant(request), body.metadata or {})
        if items:
            await self._conversations.add(record.tenant, record.id, items)
        return json_response(record.as_json())

    async def conversation(self, request: Request) -> Response:
        record = await self._conversations.record(_tenant(request), request.path_params["conversation_id"])
        return json_response(record.as_json())

    async def describe(self, request: Request) -> Response:
        """Replace a conversation's metadata."""
        body = await read_fields(request, self._body_limits, DescribeRequest)
        record = await self._conversations.describe(
            _tenant(request), request.path_params["conversation_id"], body.metadata or {}
        )
        return json_response(record.as_json())

    async def delete_conversation(self, request: Request) -> Response:
        """Delete a conversation with its items."""
        conversation_id = request.path_params["conversation_id"]
        await self._conversations.delete(_tenant(request), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        page = page_asked(request.query_params, default=ITEMS_PAGE[0], most=ITEMS_PAGE[1], others=INCLUDE)
        items = await self._conversations.items(_tenant(request), request.path_params["conversation_id"])
        found, more = page.of(items, _id_of)
        return json_response(listed(found, has_more=more))

    async def add_items(self, request: Request) -> Response:
        """Append items."""
        check_query(request.query_params, INCLUDE)
        body = await read_fields(request, self._body_limits, ItemsRequest)
        items = await asyncio.to_thread(told_items, body.items)
        added = await self._conversations.add(_tenant(request), request.path_params["conversation_id"], items)
        return json_response(listed(added, has_more=False))

    async def item(self, request: Request) -> Response:
        check_query(request.query_params, INCLUDE)
        parameters = request.path_params
        return json_response(
            await self._conversations.item(_tenant(request), parameters["conversation_id"], parameters["item_id"])
        )

    async def delete_item(self, request: Request) -> Response:
        """Delete an item of a conversation."""
        parameters = request.path_params
        record = await self._conversations.remove(
            _tenant(request), parameters["conversation_id"], parameters["item_id"]
        )
        return json_response(record.as_json())


def _tenant(request: Request) -> str:
    return request_scope(request.scope).tenant.name


def _id_of(item: Json) -> str:
    return item["id"]


def _with_status(record: ResponseRecord, content: Content) -> bytes:
    """The object of a response that did not finish normally."""
    return msgspec.json.encode(msgspec.json.decode(content.object) | {"status": record.status})


def _is_true(query: Mapping[str, str], name: str) -> bool:
    """Raises InvalidRequestError."""
    text = query.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidRequestError(f"{name}: must be true or false", param=name)
    return text == "true"


def _number(query: Mapping[str, str], name: str) -> int:
    """The number of an event; -1 for none. Raises InvalidRequestError."""
    text = query.get(name, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequestError(f"{name}: must be the sequence_number of an event", param=name)
    return int(text) if text else -1
