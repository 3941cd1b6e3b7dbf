"""How clients send their key. Each dialect has its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyForm:
    """Where a key is, and the answer to a client without one."""

    read: Callable[[Mapping[str, str]], str]  # from a request's fields; "" where there is none
    hint: str  # how to send one, for error messages
    challenge: str = ""  # `WWW-Authenticate` of a 401, if any
    scheme: Mapping[str, Any]  # OpenAPI's security scheme


def bearer_key(headers: Mapping[str, str]) -> str:
    """The key of an `Authorization: Bearer` header, or of Anthropic's or Azure's clients."""
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
    """Return the text for a client without a valid key of this kind."""
    return f"a valid {kind} is needed: send {form.hint}"
