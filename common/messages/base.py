"""The protocol's version, and the head of each message about a request."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1  # version N understands N-1
MAX_PROTOCOL_VERSION = PROTOCOL_VERSION + 1  # version N+2 is not promised to work


class AttemptMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a message about one attempt of a request."""

    v: int = PROTOCOL_VERSION
    request_id: str
    attempt: int
    traceparent: str | UnsetType = UNSET  # W3C, the attempt's span or its transfer's; left out when unset


class WorkerMessage(AttemptMessage, frozen=True, kw_only=True):
    """The head of a worker's message about an attempt."""

    worker: str
    incarnation: int
