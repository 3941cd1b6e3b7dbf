"""Clients' keys: each dialect has its own form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
