"""Sessions under names: their tokens, kept beside responses in JetStream, and read back.

KV itself is kept by workers, in their pools and tiers, and found by the tokens' hashes. What went from there is computed again.
"""

from __future__ import annotations

import time
import uuid

import msgspec

from common import subjects
from common.errors import InvalidRequestError
from common.subjects import root_of
from gateway.answers.sessions import SessionState
from gateway.http.problem import Json, NotKeptError
from gateway.keeping.layout import token_of
from gateway.keeping.streams import KeptStreams

TENANT_SESSIONS = 64
SESSION_BYTES = 4 << 20  # a million tokens; NATS carries 8 MiB


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kept session. Its tokens are a message of their own, named by `content`."""

    name: str
    tenant: str
    model: str
    weights: str
    created_at: int  # unix seconds
    num_tokens: int
    content: str
    cache_salt: str = ""

    def as_json(self) -> Json:
        return {
            "object": "session",
            "name": self.name,
            "model": self.model,
            "created_at": self.created_at,
            "num_tokens": self.num_tokens,
        }


_decoder = msgspec.msgpack.Decoder(SessionRecord)
_encode = msgspec.msgpack.Encoder().encode


class Sessions:
    """Every call raises UnavailableError if NATS can't do it now."""

    def __init__(self, streams: KeptStreams) -> None:
        self._streams = streams

    async def save(self, tenant: str, name: str, state: SessionState) -> SessionRecord:
        """Keep a state under a name, instead of what it named. Raises InvalidRequestError, StoreFullError."""
        if len(state.token_ids) > SESSION_BYTES:
            most = SESSION_BYTES // 4
            raise InvalidRequestError(
                f"the session has {len(state.token_ids) // 4} tokens, more than {most}", param="name"
            )
        before = await self._streams.get(_subject(tenant, name, "record"))
        if before is None and await self._streams.count(_all(tenant)) >= TENANT_SESSIONS:
            raise self._streams.layout.full(f"{TENANT_SESSIONS} sessions of this API key")
        record = SessionRecord(
            name=name,
            tenant=tenant,
            model=state.model,
            weights=state.weights,
            created_at=int(time.time()),
            num_tokens=len(state.token_ids) // 4,
            content=uuid.uuid4().hex,
            cache_salt=state.cache_salt,
        )
        await self._streams.put(_subject(tenant, name, record.content), state.token_ids)
        await self._streams.put(_subject(tenant, name, "record"), _encode(record))
        if before is not None:
            await self._streams.purge(_subject(tenant, name, _decoder.decode(before.data).content))
        return record

    async def record(self, tenant: str, name: str) -> SessionRecord:
        """Raises NotKeptError."""
        stored = await self._streams.get(_subject(tenant, name, "record"))
        if stored is None:
            raise _no_session(name)
        return _decoder.decode(stored.data)

    async def load(self, tenant: str, name: str) -> SessionState:
        """Raises NotKeptError."""
        record = await self.record(tenant, name)
        stored = await self._streams.get(_subject(tenant, name, record.content))
        if stored is None:  # it was replaced meanwhile
            raise _no_session(name)
        return SessionState(
            model=record.model, weights=record.weights, cache_salt=record.cache_salt, token_ids=stored.data
        )

    async def listed(self, tenant: str) -> list[SessionRecord]:
        """A tenant's sessions by their names."""
        found = {}
        async for stored in self._streams.scan(_all(tenant)):
            record = _decoder.decode(stored.data)
            found[record.name] = record
        return [found[name] for name in sorted(found)]

    async def drop(self, tenant: str, name: str) -> SessionRecord:
        """Raises NotKeptError."""
        record = await self.record(tenant, name)
        await self._streams.purge(_subject(tenant, name, ">"))
        return record


def _subject(tenant: str, name: str, part: str) -> str:
    return f"{_root(tenant)}.{token_of(name)}.{part}"


def _all(tenant: str) -> str:
    """The subjects of a tenant's records."""
    return f"{_root(tenant)}.*.record"


def _root(tenant: str) -> str:
    return f"{root_of(subjects.RESPONSES_STREAM)}.{token_of(tenant)}.session"


def _no_session(name: str) -> NotKeptError:
    return NotKeptError(f"no session {name[:100]!r} is kept: GET /v1/sessions lists yours", param="name")
