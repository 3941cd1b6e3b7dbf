"""Keys made at run time, and each key's usage, in NATS: through another connection than the bus, so that they delay no token.

All keys are one message, which is replaced only if it is still what was read. Every gateway asks twice a second whether there
is a newer one: a revoked key is refused everywhere within a second. A gateway that can't ask goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import nats.js.errors
from nats.js.api import DiscardPolicy, RawStreamMsg, StorageType, StreamConfig

from common import subjects
from common.errors import UnavailableError, text_of
from common.tasks import cancel_all
from common.wire import ERRORS, Wire, add_stream
from gateway.tenants.register import NOTHING, Change, Register, register_decoder
from gateway.tenants.tenants import Tenants
from gateway.tenants.usage import DAY_S, KEEP_DAYS, Usage, UsageRecord, usage_decoder

log = logging.getLogger("baton.keys")

LOOK_EACH_S = 0.5
DENIED_EACH_S = 30.0
WRITE_USAGE_EACH_S = 20.0
API_TIMEOUT_S = 3.0
CHANGE_TRIES = 20
KEYS_BYTES = 8 << 20
USAGE_BYTES = 64 << 20
MAX_RECORDS = 20_000  # read for one picture
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_WRONG_SEQUENCE = 10071
_STREAMS = (subjects.KEYS_STREAM, subjects.USAGE_STREAM)
_NAMES = tuple(name.lower() for one in _STREAMS for name in (one, f"{subjects.root_of(one)}."))
_encode = msgspec.msgpack.Encoder().encode


class KeptKeys:
    """One gateway's view of the keys. `tenants` get each newer register; None until one could be read."""

    def __init__(self, wire: Wire, tenants: Tenants, *, gateway_id: str, incarnation: int) -> None:
        self._tenants = tenants
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._client = wire
        self._js = wire.jetstream(timeout=API_TIMEOUT_S)
        self._seen = 0  # sequence of the register that `tenants` have
        self._told = ""  # the last logged complaint
        self._denied = False
        self._is_known = False  # the store was read once
        self._turn = asyncio.Lock()
        self._listeners: list[Callable[[Register], None]] = []
        self.register = NOTHING
        self.usage = Usage()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Context manager: read the keys, and follow their changes. Failures are logged, not raised."""
        self._client.on_error.append(self._on_error)
        self._client.on_return.append(self._on_return)
        if not await self._look_safely():
            self._tenants.apply(None)
        tasks = [asyncio.create_task(one) for one in (self._follow(), self._write_often())]
        try:
            yield
        finally:
            await cancel_all(tasks)
            with contextlib.suppress(*ERRORS, UnavailableError):
                await self._write_usage()

    def listen(self, listener: Callable[[Register], None]) -> None:
        """Call `listener` with the register now, and with each newer one."""
        self._listeners.append(listener)
        listener(self.register)

    async def change(self, to: Change) -> Register:
        """Apply `to` to the newest register, retrying on conflicts; when this returns it is on disk, and applied here.

        Raises what `to` raises, or UnavailableError.
        """
        async with self._turn:
            for _ in range(CHANGE_TRIES):
                seq = await self._look()
                changed = to(self.register)
                if changed == self.register:
                    return changed
                if written := await self._replace(changed, seq):
                    self._take(changed, written)
                    return changed
        raise UnavailableError("the keys are changed all the time: try again")

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EACH_S if not self._denied else DENIED_EACH_S)
            try:
                await self._look_safely()
            except Exception:  # our own bug must not end the following of revocations
                log.exception("keys.look_failed")

    async def _look_safely(self) -> bool:
        """Return True if the keys are up to date."""
        try:
            await self._look()
        except UnavailableError as error:
            self._complain(error.message)
            return False
        self._told = ""
        return True

    async def _look(self) -> int:
        """Read a newer register, if there is one. Returns the sequence that the next one must follow."""
        stored = await self._next(subjects.KEYS_STREAM, subjects.KEYS, after=self._seen)
        if stored is not None:
            try:
                register = register_decoder.decode(stored.data or b"")
            except msgspec.MsgspecError as error:
                raise UnavailableError(f"the record of keys can't be read: {error}"[:200]) from None
            self._take(register, stored.seq or 0)
        elif not self._is_known:
            self._take(self.register, 0)  # there is none yet
        return self._seen

    def _take(self, register: Register, seq: int) -> None:
        self.register, self._seen, self._is_known = register, seq, True
        self._tenants.apply(register)
        for listener in self._listeners:
            listener(register)

    async def _replace(self, register: Register, seq: int) -> int:
        """Write the register; return the new sequence, or 0 on a conflict."""
        await self._ensure(_keys_stream())
        try:
            ack = await self._js.publish(subjects.KEYS, _encode(register), headers={_EXPECTED: str(seq)})
        except nats.js.errors.APIError as error:
            if error.err_code == _WRONG_SEQUENCE:
                if seq and await self._next(subjects.KEYS_STREAM, subjects.KEYS, after=0) is None:
                    self._seen = 0  # the server lost it: our copy is written again
                return 0
            raise UnavailableError(f"the keys can't be written: {text_of(error)}") from error
        except ERRORS as error:
            raise UnavailableError(f"the keys can't be written: {text_of(error)}") from error
        return ack.seq

    # -- usage ---------------------------------------------------------------------------------------------------------

    async def used(self, days: int) -> list[UsageRecord]:
        """The records of all gateways for the last `days`, and this one's counts. Raises UnavailableError."""
        first = int(time.time()) // DAY_S - days
        found, after = self.usage.records(), 0
        known = {record.day for record in found}
        own = f".{self._gateway_id}.{self._incarnation}"
        subject = subjects.usage(subjects.ANY, subjects.ANY, subjects.ANY)
        for _ in range(MAX_RECORDS):
            stored = await self._next(subjects.USAGE_STREAM, subject, after=after)
            if stored is None:
                break
            after = stored.seq or 0
            day = (stored.subject or "").split(".")[2]
            is_known = day.isdigit() and int(day) in known and (stored.subject or "").endswith(own)
            if is_known or not day.isdigit() or int(day) < first:
                continue
            with contextlib.suppress(msgspec.MsgspecError):  # another release's record
                found.append(usage_decoder.decode(stored.data or b""))
        return found

    async def _write_often(self) -> None:
        while True:
            await asyncio.sleep(WRITE_USAGE_EACH_S)
            with contextlib.suppress(UnavailableError):  # logged already
                await self._write_usage()

    async def _write_usage(self) -> None:
        changed = self.usage.take_changed()
        for record in changed:
            try:
                await self._ensure(_usage_stream())
                await self._js.publish(subjects.usage(record.day, self._gateway_id, self._incarnation), _encode(record))
            except (*ERRORS, UnavailableError):
                self.usage.again(record)

    # -- connection ----------------------------------------------------------------------------------------------------

    async def _next(self, stream: str, subject: str, *, after: int) -> RawStreamMsg | None:
        """The first message of a subject after `after`."""
        reading = self._js.get_msg(stream, seq=after + 1, subject=subject, next=True)
        try:
            return await self._asked(reading)
        except nats.js.errors.NotFoundError:
            return None
        except ERRORS as error:
            if self._denied:  # permissions of an older release: there are no such keys
                return None
            raise UnavailableError(f"the keys can't be read: {text_of(error)}") from error

    async def _ensure(self, config: StreamConfig) -> None:
        try:
            await self._asked(add_stream(self._js, config))
        except nats.js.errors.BadRequestError:
            pass  # it exists with another configuration
        except ERRORS as error:
            remedy = ": make NATS's users again (`baton users`)" if self._denied else ""
            raise UnavailableError(f"keys can't be kept: {text_of(error)}{remedy}") from error

    async def _asked(self, question: Coroutine[Any, Any, Any]) -> Any:
        if not self._client.is_connected:  # the client would buffer what is sent
            question.close()
            raise UnavailableError("not connected to NATS")
        return await question

    async def _on_error(self, error: Exception) -> None:
        told = str(error).lower()
        if "permissions violation" in told and any(name in told for name in _NAMES):
            self._denied = True
        log.debug("keys.connection", extra={"error": text_of(error)})

    async def _on_return(self) -> None:
        self._seen, self._denied = 0, False  # the server may have lost its messages, or have new users

    def _complain(self, text: str) -> None:
        if self._told != text:  # once, until it works again
            log.warning("keys.not_followed", extra={"error": text})
        self._told = text


def _keys_stream() -> StreamConfig:
    return StreamConfig(
        name=subjects.KEYS_STREAM,
        subjects=["baton.keys.>"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        max_bytes=KEYS_BYTES,
    )


def _usage_stream() -> StreamConfig:
    return StreamConfig(
        name=subjects.USAGE_STREAM,
        subjects=["baton.usage.>"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_bytes=USAGE_BYTES,
        max_age=KEEP_DAYS * DAY_S,
    )
