"""The OpenAPI part of stored responses and conversations."""

from __future__ import annotations

from gateway.http.api import JSON, ApiPart, errors, fields, get, path_parameters, post, ref
from gateway.http.problem import Json
from gateway.http.streaming import EVENTS
from gateway.responses.bodies import ConversationRequest, DescribeRequest, ItemsRequest

_RESPONSE, _CONVERSATIONS = "/v1/responses/{response_id}", "/v1/conversations"
_CONVERSATION = f"{_CONVERSATIONS}/{{conversation_id}}"
_ITEMS = f"{_CONVERSATION}/items"
_ITEM = f"{_ITEMS}/{{item_id}}"
_OBJECT: Json = {"type": "object"}
_LIST = fields(
    {
        "object": {"const": "list"},
        "data": {"type": "array", "items": _OBJECT},
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
        "has_more": {"type": "boolean"},
    }
)
_SCHEMAS: dict[str, Json] = {
    "Conversation": fields(
        {
            "id": {"type": "string"},
            "object": {"const": "conversation"},
            "created_at": {"type": "integer"},
            "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        }
    ),
    "KeptItems": _LIST,
}


def _query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


_INCLUDE = _query("include", {"type": "array", "items": {"type": "string"}})
_PAGE = (
    _query("after", {"type": "string"}),
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
    _query("order", {"enum": ["asc", "desc"]}),
    _INCLUDE,
)
_STREAM = (
    _query("stream", {"type": "boolean"}),
    _query("starting_after", {"type": "integer", "minimum": 0}),
    _query("include_obfuscation", {"type": "boolean"}),
    _INCLUDE,
)


def _deleted(path: str, summary: str, kind: str) -> Json:
    told = fields({"id": {"type": "string"}, "object": {"const": kind}, "deleted": {"const": True}})
    return get(path, summary, JSON, answer=told)


def _bodiless(path: str, summary: str, answer: Json) -> Json:
    responses = {"200": {"description": "OK", "content": {JSON: {"schema": answer}}}} | errors()
    return {"summary": summary, "parameters": path_parameters(path), "responses": responses}


_response, _conversation, _items = ref("Response"), ref("Conversation"), ref("KeptItems")
RESPONSES_API = ApiPart(
    paths={
        _RESPONSE: {
            "get": get(_RESPONSE, "A kept response, or its events.", JSON, EVENTS, query=_STREAM, answer=_response),
            "delete": _deleted(_RESPONSE, "Delete a kept response.", "response"),
        },
        f"{_RESPONSE}/cancel": {
            "post": _bodiless(f"{_RESPONSE}/cancel", "Make no more of a background response.", _response)
        },
        f"{_RESPONSE}/input_items": {
            "get": get(f"{_RESPONSE}/input_items", "What a response was asked.", JSON, query=_PAGE, answer=_items)
        },
        _CONVERSATIONS: {"post": post(ConversationRequest, _conversation)},
        _CONVERSATION: {
            "get": get(_CONVERSATION, "A conversation.", JSON, answer=_conversation),
            "post": post(DescribeRequest, _conversation) | {"parameters": path_parameters(_CONVERSATION)},
            "delete": _deleted(_CONVERSATION, "Delete a conversation with its items.", "conversation.deleted"),
        },
        _ITEMS: {
            "get": get(_ITEMS, "A conversation's items.", JSON, query=_PAGE, answer=_items),
            "post": post(ItemsRequest, _items) | {"parameters": [*path_parameters(_ITEMS), _INCLUDE]},
        },
        _ITEM: {
            "get": get(_ITEM, "An item of a conversation.", JSON, query=(_INCLUDE,), answer=_OBJECT),
            "delete": get(_ITEM, "Delete an item of a conversation.", JSON, answer=_conversation),
        },
    },
    bodies=(ConversationRequest, DescribeRequest, ItemsRequest),
    schemas=_SCHEMAS,
)
