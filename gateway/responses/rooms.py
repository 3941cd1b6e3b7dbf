"""Storage quotas of tenants. Old responses are evicted for what is new; conversations and sessions are not.

A gateway counts what it writes, and looks now and then at what all gateways have written: so a tenant may be above its bound by
what the others write meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from common import subjects
from common.errors import OverloadedError
from gateway.keeping.layout import StoreFullError, token_of
from gateway.keeping.streams import KeptStreams
from gateway.responses.records import ResponseLimits, ResponseRecord, conversation_decoder, record_decoder
from gateway.sessions.store import SessionRecord, records_of, session_decoder

LOOK_EVERY_S = 60.0
LOOK_AGAIN_S = 0.5
TENANT_SESSIONS = 64
TURN_TIMEOUT_S = 10.0  # wait for the tenant's other writes


@dataclass(slots=True)
class Held:
    """A tenant's usage, as this gateway knows it."""

    looked_at: float = 0.0
    bytes: int = 0
    conversations: int = 0
    responses: deque[tuple[str, int]] = field(
        default_factory=deque
    )  # id and bytes of evictable responses, oldest first
    running: int = 0  # others
    sessions: dict[str, int] = field(default_factory=dict)  # name -> bytes

    def count(self, record: ResponseRecord) -> None:
        self.bytes += record.bytes
        if record.is_over:
            self.responses.append((record.id, record.bytes))
        else:
            self.running += 1


class Rooms:
    """Makes room for a write, or refuses it."""

    def __init__(self, streams: KeptStreams, limits: ResponseLimits) -> None:
        self._streams = streams
        self._limits = limits
        self._most = int(limits.store_bytes * limits.tenant_share)
        self._held: dict[str, Held] = {}  # one a configured tenant
        self._turns: dict[str, asyncio.Lock] = {}

    async def for_response(self, record: ResponseRecord) -> None:
        """Make room for a response. Raises StoreFullError, OverloadedError or UnavailableError."""
        async with self._turn(record.tenant) as held:
            if not record.is_over and held.running >= self._limits.tenant_running:
                held = await self._look_again(record.tenant, held)  # some may have ended
            if not record.is_over and held.running >= self._limits.tenant_running:
                raise OverloadedError(
                    f"{held.running} background responses of this API key are not over: try again later"
                )
            most = self._limits.tenant_responses - 1
            while held.responses and len(held.responses) + held.running > most:
                await self._drop_oldest(record.tenant, held)
            await self._make(record.tenant, held, record.bytes)
            held.count(record)

    async def for_conversation(self, tenant: str) -> None:
        """Make room for a response. Raises StoreFullError, OverloadedError or UnavailableError."""
        async with self._turn(tenant) as held:
            if held.conversations >= self._limits.tenant_conversations:
                raise self._full(f"{held.conversations} conversations of this API key")
            held.conversations += 1

    async def for_turn(self, tenant: str, num_bytes: int) -> None:
        """Make room for a response. Raises StoreFullError, OverloadedError or UnavailableError."""
        async with self._turn(tenant) as held:
            await self._make(tenant, held, num_bytes)
            held.bytes += num_bytes

    async def for_session(self, record: SessionRecord) -> None:
        """See `SessionRooms.for_session`."""
        async with self._turn(record.tenant) as held:
            if _is_one_too_many(record, held):
                held = await self._look_again(record.tenant, held)  # some may have been dropped
            if _is_one_too_many(record, held):
                raise self._full(f"{len(held.sessions)} sessions of this API key")
            num_bytes = record.bytes - held.sessions.get(record.name, 0)
            await self._make(record.tenant, held, num_bytes)
            held.bytes += num_bytes
            held.sessions[record.name] = record.bytes

    def forget(self, tenant: str) -> None:
        """Invalidate the usage after a deletion."""
        self._held.pop(tenant, None)

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[Held]:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await turn.acquire()
        except TimeoutError:
            raise OverloadedError("much of this API key is being kept: try again later") from None
        try:
            held = self._held.get(tenant)
            if held is None or time.monotonic() - held.looked_at > LOOK_EVERY_S:
                held = self._held[tenant] = await self._look(tenant)
            yield held
        finally:
            turn.release()

    async def _look_again(self, tenant: str, held: Held) -> Held:
        """Read a tenant's usage again, unless it was read just now."""
        if time.monotonic() - held.looked_at > LOOK_AGAIN_S:
            held = self._held[tenant] = await self._look(tenant)
        return held

    async def _look(self, tenant: str) -> Held:
        held, token = Held(looked_at=time.monotonic()), token_of(tenant)
        found: dict[str, ResponseRecord] = {}  # a record that changes meanwhile is read twice
        async for stored in self._streams.scan(subjects.kept_response(token, "*", "record")):
            with contextlib.suppress(msgspec.MsgspecError):  # another release's
                record = record_decoder.decode(stored.data)
                found[record.id] = record
        for record in sorted(found.values(), key=lambda record: record.created_at):
            held.count(record)
        async for stored in self._streams.scan(subjects.kept_conversation(token, "*", "record")):
            with contextlib.suppress(msgspec.MsgspecError):
                held.bytes += conversation_decoder.decode(stored.data).bytes
                held.conversations += 1
        async for stored in self._streams.scan(records_of(tenant)):
            with contextlib.suppress(msgspec.MsgspecError):
                session = session_decoder.decode(stored.data)
                held.sessions[session.name] = session.bytes
        held.bytes += sum(held.sessions.values())
        return held

    async def _make(self, tenant: str, held: Held, num_bytes: int) -> None:
        while held.responses and held.bytes + num_bytes > self._most:
            await self._drop_oldest(tenant, held)
        if held.bytes + num_bytes > self._most:
            raise self._full(f"{max(0, self._most - held.bytes)} bytes are left for this API key")

    async def _drop_oldest(self, tenant: str, held: Held) -> None:
        response, num_bytes = held.responses[0]
        await self._streams.purge(subjects.kept_response(token_of(tenant), response, ">"))
        held.responses.popleft()
        held.bytes -= num_bytes

    def _full(self, told: str) -> StoreFullError:
        return self._streams.layout.full(told)


def _is_one_too_many(record: SessionRecord, held: Held) -> bool:
    return record.name not in held.sessions and len(held.sessions) >= TENANT_SESSIONS
