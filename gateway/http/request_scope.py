"""The gateway's facts about an HTTP request: one typed value in its ASGI scope."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.tracing import Value
from gateway.tenants.tenants import ANYBODY, Tenant

_KEY = "baton"
_FIELDS = "baton.fields"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyForm:
    """The place of a key, and the answer to a client without one."""

    read: Callable[[Mapping[str, str]], str]  # reads it from a request's fields; "" if absent
    hint: str  # how to send one, for error messages
    challenge: str = ""  # `WWW-Authenticate` of a 401, if any
    scheme: Mapping[str, Any]  # OpenAPI's security scheme


def bearer_key(headers: Mapping[str, str]) -> str:
    """The key in an `Authorization: Bearer` header, or in Anthropic's or Azure's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or headers.get("api-key", "")


BEARER = KeyForm(
    read=bearer_key,
    hint="`Authorization: Bearer KEY`",
    challenge="Bearer",
    scheme={"type": "http", "scheme": "bearer", "description": "an API key; x-api-key and api-key headers do as well"},
)


def needed(kind: str, form: KeyForm) -> str:
    """Return the message for a client without a valid key of this kind."""
    return f"a valid {kind} is needed: send {form.hint}"


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The open span around a request, completed by the endpoint."""

    context: str = ""  # W3C `traceparent`; the client's if no span is recorded
    parent: str = ""
    began_at: float = 0.0
    is_recorded: bool = False
    status: int = 0
    error: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    answered: Callable[[], Mapping[str, Value]] | None = None  # attributes of the answer, once it has ended


class BodyWriter(Protocol):
    """Writes an answer's body synchronously, once its head is sent."""

    idle_event: bytes  # may be written between any two parts; empty: nothing may

    def take_body(self) -> bytes | None:
        """The request's body, if it arrived completely and was not taken."""
        ...

    def hold_head(self) -> None:
        """Hold the answer's head until the first part of its body, which follows at once."""
        ...

    @property
    def is_read(self) -> bool:
        """True if the client keeps up; otherwise writes are buffered."""
        ...

    async def read(self) -> None:
        """Return once the client has read the buffer, or left."""
        ...

    def write(self, data: bytes) -> None:
        """Write the next part."""
        ...

    def end(self, data: bytes) -> None:
        """Write the last part."""
        ...


@dataclass(slots=True, eq=False)
class RequestScope:
    """Instants are `time.monotonic()`."""

    received_at: float = field(default_factory=time.monotonic)  # when the head was complete
    read_at: float = field(default_factory=time.monotonic)  # when the newest byte was read
    request_id: str = ""
    tenant: Tenant = ANYBODY
    trace: RequestTrace = field(default_factory=RequestTrace)
    status: int = 0  # the answer's; 0: not started
    problem: int = 0  # status before the dialect's mapping; 0: none
    waited: bool = False  # refused after waiting
    headers: Mapping[str, str] = field(default_factory=dict)  # added to any answer
    writer: BodyWriter | None = None  # the connection's


def request_scope(scope: MutableMapping[str, Any]) -> RequestScope:
    """The value in `scope`, created on first use."""
    state: RequestScope | None = scope.get(_KEY)
    if state is None:
        state = scope[_KEY] = RequestScope()
    return state


def fields_of(scope: MutableMapping[str, Any]) -> Mapping[str, str]:
    """The request's headers by lower-case name, parsed once; the first one of duplicates."""
    fields: Mapping[str, str] | None = scope.get(_FIELDS)
    if fields is None:
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        scope[_FIELDS] = fields
    return fields


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's id for a request, or a new one."""
    asked = headers.get("x-request-id", "")
    return asked if _REQUEST_ID.match(asked) else secrets.token_hex(16)
