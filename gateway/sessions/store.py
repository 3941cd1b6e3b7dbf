"""Sessions under names: their tokens, kept beside responses in JetStream, and read back.

KV itself is kept by workers, in their pools and tiers, and found by the tokens' hashes. What went from there is computed again.

A mark is written before a content, and the record that names it last. A content is deleted once no record names it, and then
its mark. So what a gateway leaves that dies between is found by its mark, without reading contents: it reads as absent, and a
list or save of the tenant sweeps it that comes `SAVE_S` after another one of the same gateway. No two clocks are compared.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Protocol

import msgspec

from common import subjects
from common.errors import InvalidRequestError, UnavailableError
from common.subjects import root_of
from gateway.answers.sessions import SessionState
from gateway.http.problem import Json, NotKeptError
from gateway.keeping.changing import CHANGE_TRIES
from gateway.keeping.layout import token_of
from gateway.keeping.streams import KeptStreams

SESSION_BYTES = 4 << 20  # a million tokens; NATS carries 8 MiB
RECORD_BYTES = 512  # what a record takes, about
_MARK = ".mark"
SAVE_S = 300.0  # longer than a save


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

    @property
    def bytes(self) -> int:
        return RECORD_BYTES + 4 * self.num_tokens

    def as_json(self) -> Json:
        return {
            "object": "session",
            "name": self.name,
            "model": self.model,
            "created_at": self.created_at,
            "num_tokens": self.num_tokens,
        }


class SessionRooms(Protocol):
    """The tenants' room in the store."""

    async def for_session(self, record: SessionRecord) -> None:
        """Make room for a session, or for another state of it. Raises StoreFullError, OverloadedError."""

    def forget(self, tenant: str) -> None:
        """Invalidate the usage after a deletion."""


session_decoder = msgspec.msgpack.Decoder(SessionRecord)
_encode = msgspec.msgpack.Encoder().encode


class Sessions:
    """Every call raises UnavailableError if NATS can't do it now."""

    def __init__(self, streams: KeptStreams, rooms: SessionRooms) -> None:
        self._streams, self._rooms = streams, rooms
        self._unnamed: dict[
            str, dict[str, float]
        ] = {}  # marks without a record, since when they are seen here, by tenant

    async def save(self, tenant: str, name: str, state: SessionState) -> SessionRecord:
        """Keep a state under a name, instead of what it named. Raises InvalidRequestError, StoreFullError."""
        if len(state.token_ids) > SESSION_BYTES:
            most = SESSION_BYTES // 4
            raise InvalidRequestError(
                f"the session has {len(state.token_ids) // 4} tokens, more than {most}", param="name"
            )
        record = SessionRecord(
            name=name,
            tenant=tenant,
            model=state.model,
            weights=state.weights,
            created_at=int(time.time()),
            num_tokens=len(state.token_ids) // 4,
            content=f"{int(time.time()):08x}{uuid.uuid4().hex}",
            cache_salt=state.cache_salt,
        )
        await self._sweep(tenant)
        await self._rooms.for_session(record)
        try:
            await self._streams.put(_mark(_content(record)), b"")
            await self._streams.put(_content(record), state.token_ids)
            before = await self._name(record)
        except BaseException:
            self._rooms.forget(tenant)  # nobody knows what of it is stored
            raise
        if before is not None:
            await self._delete(_content(before))
        return record

    async def record(self, tenant: str, name: str) -> SessionRecord:
        """Raises NotKeptError."""
        return (await self._find(tenant, name))[0]

    async def load(self, tenant: str, name: str) -> SessionState:
        """Raises NotKeptError."""
        seen = 0
        while True:
            record, seq = await self._find(tenant, name)
            stored = await self._streams.get(_content(record))
            if stored is not None:
                return SessionState(
                    model=record.model, weights=record.weights, cache_salt=record.cache_salt, token_ids=stored.data
                )
            if seq == seen:  # no other state took its place
                await self._forget(record, seq)
            seen = seq

    async def listed(self, tenant: str) -> list[SessionRecord]:
        """A tenant's sessions by their names."""
        found = await self._sweep(tenant)
        return [found[name] for name in sorted(found)]

    async def drop(self, tenant: str, name: str) -> SessionRecord:
        """Raises NotKeptError."""
        record, seq = await self._find(tenant, name)
        await self._forget(record, seq)
        await self._delete(_content(record))
        return record

    async def _name(self, record: SessionRecord) -> SessionRecord | None:
        """Let the name keep this record; return the one that it kept. Of concurrent ones each replaces another."""
        for _ in range(CHANGE_TRIES):
            before = await self._streams.get(_record(record.tenant, record.name))
            seq = before.seq if before is not None else 0
            if await self._streams.replace(_record(record.tenant, record.name), _encode(record), seq=seq):
                return session_decoder.decode(before.data) if before is not None else None
        raise UnavailableError(f"session {record.name} is saved all the time: try again")

    async def _find(self, tenant: str, name: str) -> tuple[SessionRecord, int]:
        """A session that has its content, and its record's sequence. Raises NotKeptError."""
        seen = 0
        while (stored := await self._streams.get(_record(tenant, name))) is not None:
            record = session_decoder.decode(stored.data)
            for part in (_mark(_content(record)), _content(record)):
                if await self._streams.get(part) is not None:
                    return record, stored.seq
            if stored.seq == seen:  # no other state took its place
                await self._forget(record, seen)
            seen = stored.seq
        raise NotKeptError(f"no session {name[:100]!r} is kept: GET /v1/sessions lists yours", param="name")

    async def _delete(self, content: str) -> None:
        await self._streams.purge(content)
        await self._streams.purge(_mark(content))

    async def _forget(self, record: SessionRecord, seq: int) -> None:
        """Delete a record, unless the name keeps another one by now."""
        await self._streams.purge(_record(record.tenant, record.name), through=seq)
        self._rooms.forget(record.tenant)

    async def _sweep(self, tenant: str) -> dict[str, SessionRecord]:
        """A tenant's sessions by their names. Deletes what is left of others."""
        found: dict[str, SessionRecord] = {}
        marks = {stored.subject async for stored in self._streams.scan(_mark(_each(tenant, "*")))}
        async for stored in self._streams.scan(records_of(tenant)):
            record = session_decoder.decode(stored.data)
            if _mark(_content(record)) in marks:
                found[record.name] = record
            else:  # it lost its content, or is newer than the marks
                found.pop(record.name, None)
                with contextlib.suppress(NotKeptError):
                    found[record.name], _ = await self._find(tenant, record.name)
        now, seen = time.monotonic(), self._unnamed.get(tenant, {})
        unnamed = {mark: seen.get(mark, now) for mark in marks - {_mark(_content(record)) for record in found.values()}}
        for mark in [mark for mark, since in unnamed.items() if since + SAVE_S < now]:
            await self._delete(mark.removesuffix(_MARK))
            del unnamed[mark]
        self._unnamed.pop(tenant, None)
        if unnamed:
            self._unnamed[tenant] = unnamed
        return found


def records_of(tenant: str) -> str:
    """The subjects of a tenant's records."""
    return _each(tenant, "record")


def _each(tenant: str, part: str) -> str:
    return f"{root_of(subjects.RESPONSES_STREAM)}.{token_of(tenant)}.session.*.{part}"


def _record(tenant: str, name: str) -> str:
    return records_of(tenant).replace("*", token_of(name))


def _content(record: SessionRecord) -> str:
    return _each(record.tenant, record.content).replace("*", token_of(record.name))


def _mark(content: str) -> str:
    return content + _MARK
