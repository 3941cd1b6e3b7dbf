"""Responses and conversations as stored, and a response's statuses. No I/O."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from common import subjects
from common.errors import InvalidRequestError
from gateway.http.problem import NotKeptError
from gateway.keeping.layout import token_of

Json = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
# Legal transitions. A stopping gateway requeues what it started.
NEXT: dict[Status, frozenset[Status]] = {
    "queued": frozenset({"in_progress", "failed", "cancelled"}),
    "in_progress": frozenset({"queued", "completed", "incomplete", "failed", "cancelled"}),
    "completed": frozenset(),
    "incomplete": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
OVER = frozenset(status for status, following in NEXT.items() if not following)
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}\Z")
_CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}\Z")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})([0-9a-f]{4,8})\Z")
FIRST_INPUT = 0x8000  # input items are numbered from here, output items from 0
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}


class PreviousResponseError(InvalidRequestError):
    """The previous response is not stored, or can't be continued."""

    code = "previous_response_not_found"


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A response and its status. Its input and object are stored beside it, see `Content`.

    `before` has the ids of the responses that it goes on from, the oldest first. `starts` counts how often a gateway began it.
    `content` is the number of the content that counts, which has `parts`: 0 is what it was begun with. `bytes` are those of all
    its contents, `history_bytes` those of `before`.
    """

    id: str
    tenant: str
    status: Status
    created_at: int  # unix seconds, as are all times here
    model: str = ""
    before: list[str] = []
    conversation: str = ""
    bytes: int = 0
    history_bytes: int = 0
    content: int = 0
    parts: int = 0
    is_background: bool = False
    keeps_events: bool = False
    starts: int = 0

    @property
    def subject(self) -> str:
        return subjects.kept_response(token_of(self.tenant), self.id, "record")

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def to(self, status: Status, **changes: Any) -> ResponseRecord:
        """The record in its next status. Raises ValueError for an illegal transition."""
        if status not in NEXT[self.status]:
            raise ValueError(f"a response that is {self.status} can't be {status}")
        return msgspec.structs.replace(self, status=status, **changes)


class Content(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a response as JSON texts: input items, response object, and the body of a queued one."""

    input: bytes
    object: bytes
    body: bytes = b""


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation. Its items are stored beside it in numbered turns."""

    id: str
    tenant: str
    created_at: int
    metadata: dict[str, str] = {}
    turns: int = 0  # written so far
    items: int = 0  # numbered so far
    bytes: int = 0

    @property
    def subject(self) -> str:
        return subjects.kept_conversation(token_of(self.tenant), self.id, "record")

    def as_json(self) -> Json:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class Events(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of a stream's events as sent; `first` is the number of its first event. Nothing follows the last run."""

    first: int
    data: bytes
    is_last: bool = False

    def behind(self, number: int) -> bytes:
        """The events after a number."""
        skipped, data = number + 1 - self.first, self.data
        return (
            data if skipped <= 0 else b"".join(event + END_OF_EVENT for event in data.split(END_OF_EVENT)[skipped:-1])
        )


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work: a background response to run."""

    response: str
    tenant: str
    created_at: int = 0


END_OF_EVENT = b"\n\n"
record_decoder = msgspec.msgpack.Decoder(ResponseRecord)
content_decoder = msgspec.msgpack.Decoder(Content)
conversation_decoder = msgspec.msgpack.Decoder(ConversationRecord)
events_decoder = msgspec.msgpack.Decoder(Events)
run_decoder = msgspec.msgpack.Decoder(Run)
encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLimits:
    """Limits of the storage."""

    store_bytes: int = 2 << 30
    keep_s: float = 30 * 86_400.0
    tenant_share: float = 0.25  # maximum share of the store for one tenant
    tenant_responses: int = 10_000  # beyond it, the oldest are deleted
    tenant_conversations: int = 1_000
    tenant_running: int = 100  # unfinished background responses
    content_bytes: int = 32 << 20
    history_bytes: int = 32 << 20  # maximum size of a request's history
    history_responses: int = 1_000
    conversation_items: int = 10_000
    concurrency: int = 64  # background responses running here
    wait_s: float = 3_600.0  # a background response that could not start by then has failed


def new_conversation_id() -> str:
    return f"conv_{uuid.uuid4().hex}"


def new_response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def checked_response_id(text: str) -> str:
    """Check that an id may be part of a subject. Raises NotKeptError."""
    if _RESPONSE_ID.match(text) is None:
        raise no_response(text)
    return text


def checked_conversation_id(text: str) -> str:
    """Check that an id may be part of a subject. Raises NotKeptError."""
    if _CONVERSATION_ID.match(text) is None:
        raise no_conversation(text)
    return text


def no_response(response_id: str) -> NotKeptError:
    message = f"no response {response_id[:100]!r}: it was not kept, was deleted, has expired, or never was"
    return NotKeptError(message, param="response_id")


def no_conversation(conversation_id: str) -> NotKeptError:
    message = f"no conversation {conversation_id[:100]!r}: it was deleted, has expired, or never was"
    return NotKeptError(message, param="conversation")


def item_id(kind: str, owner: str, number: int) -> str:
    """The id of an item, which names its response or conversation."""
    return f"{_PREFIXES.get(kind, 'item')}_{owner.partition('_')[2]}{number:04x}"


def owner_of(item: str) -> str | None:
    """The hex digits of the owner that gave an item its id; None: a client did."""
    found = _ITEM_ID.match(item)
    return found[1] if found is not None else None


def response_of(owner: str) -> str:
    return f"resp_{owner}"


def conversation_of(owner: str) -> str:
    return f"conv_{owner}"


def with_ids(items: Sequence[Json], owner: str, first: int) -> list[Json]:
    """The items, with ids of `owner` for those without one."""
    return [
        item if item.get("id") else item | {"id": item_id(str(item.get("type")), owner, first + index)}
        for index, item in enumerate(items)
    ]
