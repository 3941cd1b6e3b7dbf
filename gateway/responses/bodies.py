"""The bodies of conversations' routes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from common.errors import InvalidRequestError
from gateway.dialects.responses.items import CompactionTrigger, Item, ItemReference, checked_items
from gateway.http.fields import Metadata, StrictFields
from gateway.responses.records import Json

MAX_NEW_ITEMS = 20  # OpenAI's limit
NewItems = Annotated[list[Item], BeforeValidator(checked_items), Field(max_length=MAX_NEW_ITEMS)]
_ITEMS = {"type": "array", "maxItems": MAX_NEW_ITEMS, "items": {"type": "object"}}


class ConversationRequest(StrictFields):
    """Body of POST /v1/conversations."""

    schemas: ClassVar[dict[str, Json]] = {"items": {"anyOf": [_ITEMS, {"type": "null"}]}}

    items: NewItems | None = None
    metadata: Metadata | None = None


class DescribeRequest(StrictFields):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class ItemsRequest(StrictFields):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    schemas: ClassVar[dict[str, Json]] = {"items": _ITEMS}

    items: NewItems


def told_items(items: list[Item]) -> list[Json]:
    """Items in stored form. Raises InvalidRequestError for references."""
    for number, item in enumerate(items):
        if isinstance(item, ItemReference | CompactionTrigger):
            raise InvalidRequestError(f"items.{number}: send the item itself, not a {item.type}", param="items")
    return [item.told() for item in items]
