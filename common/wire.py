"""The connection to NATS: nats-py's client with a shorter path in and out.

nats-py hands each message to a queue and a task of its subscription, and waits for each answer with a timer. Here a handler that
does not wait runs where the message is read, and one timer serves all answers. What is taken over is private: what the parser
calls for a message, and the map of answers that are due. A release of nats-py that lacks some of it serves in its own way.

Facts behind the settings (measured, docs/operations.md): a client without `max_reconnect_attempts=-1` closes for good
after two minutes, and notices a cut cable after four unless it pings each second. Messages published while disconnected
are stored up to `pending_size`, then refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from common.access import inbox_of, read_login
from common.errors import UnavailableError, text_of
from common.log import difference
from common.tasks import Deadlines, in_time
from common.tls import Tls, client_context

log = logging.getLogger("baton.bus")

STATUS, NO_RESPONDERS = "Status", "503"
MESSAGE_ID = "Nats-Msg-Id"  # the server deduplicates by it
PENDING_BYTES = 32 << 20  # buffered while disconnected; more is refused
ATTEMPT_TIMEOUT_S = 5  # on a starved host a handshake takes seconds
ERRORS = (nats.errors.Error, OSError, TimeoutError)
OVERRIDDEN = ("_process_msg", "_init_request_sub", "_process_headers", "_error_cb")
READ = ("_subs", "_resp_map", "_resp_sub_prefix")
ARGUMENTS = ["sid", "subject", "reply", "data", "headers"]  # the arguments of `_process_msg`
STORE_TRIES, STORE_AGAIN_S = 20, 0.1
_NO_STORE = 10049  # JetStream's code of an error while it makes a stream's folder
LOST = "speed: each message takes a queue and a task of its subscription, each answer a timer"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """Connection settings of NATS. The URL may carry `user:password@` and start with `tls://`."""

    url: str = "nats://127.0.0.1:4222"
    credentials: Path | None = None  # a file with `user:password`; answers then use this user's own inbox
    tls: Tls = field(default_factory=Tls)  # used with a URL of `tls://`
    connect_timeout_s: float = 10.0  # at start; afterwards it reconnects for ever


class _Stored(msgspec.Struct):
    """JetStream's acknowledgement of a message."""

    seq: int = 0
    error: dict[str, Any] | None = None


_stored_decoder = msgspec.json.Decoder(_Stored)


@contextlib.asynccontextmanager
async def connect(settings: NatsSettings, *, name: str) -> AsyncIterator[Wire]:
    """Connect; raises as `Wire.open`. Disconnects at the end."""
    wire = Wire()
    try:
        await wire.open(settings, name=name)
        yield wire
    finally:
        await wire.leave()


class Wire(Client):  # type: ignore[misc]  # nats-py has no types
    """One connection. Its users add themselves to `on_error`, and to `on_return` for each time that a lost one is back."""

    def __init__(self) -> None:
        super().__init__()
        self.on_error: list[Callable[[Exception], Awaitable[None]]] = []
        self.on_return: list[Callable[[], Awaitable[None]]] = []
        self._began = False
        self._numbers = count()
        self._deadlines = Deadlines()
        self._lacks = lacking(self)
        if self._lacks:
            log.warning("bus.library_differs", extra=difference("nats-py", self._lacks, LOST))
            return
        self._process_msg = self._read
        self._init_request_sub = self._hear_answers

    async def open(self, settings: NatsSettings, *, name: str) -> None:
        """Connect for ever: a lost connection is made again.

        Raises UnavailableError, naming the server, when it does not answer in time, and ConfigError when a file is wrong.
        """
        identity = identity_of(settings)
        self._began = True
        connecting = self.connect(
            settings.url,
            name=name,
            **identity,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1 + random.random() * 0.1,
            connect_timeout=ATTEMPT_TIMEOUT_S,
            ping_interval=1,
            max_outstanding_pings=2,
            pending_size=PENDING_BYTES,
            error_cb=self._failed,
            reconnected_cb=self._returned,
        )
        try:
            await in_time(connecting, settings.connect_timeout_s)
        except ERRORS as error:
            why = why_not(self.last_error or error, settings.url, identity.get("user"))
            raise UnavailableError(why) from error

    async def _failed(self, error: Exception) -> None:
        for tell in self.on_error:
            await tell(error)

    async def _returned(self) -> None:
        for tell in self.on_return:
            await tell()

    async def leave(self) -> None:
        """Flush what was published and disconnect."""
        if not self._began:
            return  # nats-py closes nothing that it did not begin to connect
        if self.is_connected:
            with contextlib.suppress(*ERRORS):
                await self.flush(1)
        if not self.is_connected:
            # A handler error has no listener, and asyncio of Python 3.12.1 and 3.13.0 raises when it writes to a lost connection.
            self._pending_data_size = 0
        with contextlib.suppress(*ERRORS):
            await self.close()

    async def hear(self, subject: str, take: Callable[[Msg], None]) -> Subscription:
        """Call `take` for each message, in order, as it is read. Exceptions go to `error_cb`."""

        async def first(message: Msg) -> None:
            take(message)  # without our `_read`, or before `take` was set

        subscription = await self.subscribe(subject, cb=first)
        subscription.take = take
        return subscription

    async def _read(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = getattr(self._subs.get(sid), "take", None)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        known = await self._process_headers(headers) if headers else None
        try:
            take(Msg(_client=self, subject=subject.decode(), reply=reply.decode(), data=data, headers=known, _sid=sid))
        except Exception as error:  # an exception would end the loop that reads all messages
            await self._error_cb(error)

    def say(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Publish without waiting. Refused, with nats-py's errors, if too much is buffered."""
        if self.pending_data_size > PENDING_BYTES:
            raise nats.errors.OutboundBufferLimitError
        publishing = self.publish(subject, data, reply=reply, headers=None if headers is None else dict(headers))
        try:
            publishing.send(None)
        except StopIteration:
            return
        publishing.close()  # the message is buffered; the coroutine would only wait for the flush

    async def ask(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Msg:
        """Send a request and return the reply. Raises nats-py's errors, and TimeoutError."""
        if self._lacks:
            return await self.request(subject, data, timeout=timeout_s, headers=headers and dict(headers))
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        name = f"{next(self._numbers):x}"
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._resp_map[name] = answer
        try:
            self.say(subject, data, reply=f"{self._resp_sub_prefix.decode()}{name}", headers=headers)
            self._deadlines.add(answer, timeout_s)
            message = await answer
        finally:
            self._resp_map.pop(name, None)
        if message.headers and message.headers.get(STATUS) == NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return message

    async def store(self, subject: str, data: bytes, *, name: str, timeout_s: float) -> int:
        """Store a message in its subject's stream, once for each `name`; return its sequence. Raises as `ask`, and APIError."""
        raw = await self.ask(subject, data, timeout_s=timeout_s, headers={MESSAGE_ID: name})
        try:
            stored = _stored_decoder.decode(raw.data)
        except msgspec.MsgspecError as error:
            raise nats.errors.Error(f"JetStream answers nonsense: {error}") from error
        if stored.error is not None:
            raise nats.js.errors.APIError.from_error(stored.error)
        return stored.seq

    async def _hear_answers(self) -> None:
        await super()._init_request_sub()
        prefix = self._resp_sub_prefix.decode()
        [answers] = [known for known in self._subs.values() if known.subject == f"{prefix}*"]
        answers.take = self._answered

    def _answered(self, message: Msg) -> None:
        answer = self._resp_map.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message)


async def add_stream(jetstream: JetStreamContext, config: StreamConfig) -> None:
    """Create a stream. The server's failure to make its folder is tried again for two seconds.

    nats-server removes the folder of a deleted stream later: who makes it again at that moment gets error 10049.
    Raises nats-py's errors: BadRequestError where the stream exists with another configuration.
    """
    for _ in range(STORE_TRIES):
        try:
            await jetstream.add_stream(config)
            return
        except nats.js.errors.ServerError as error:
            if error.err_code != _NO_STORE:
                raise
        await asyncio.sleep(STORE_AGAIN_S)
    await jetstream.add_stream(config)


def lacking(client: Client) -> list[str]:
    """Private parts of nats-py that `Wire` uses and this release lacks."""
    lacks = [f"Client.{name}" for name in OVERRIDDEN + READ if not hasattr(client, name)]
    if not lacks and list(inspect.signature(Client._process_msg).parameters)[1:] != ARGUMENTS:
        lacks.append(f"Client._process_msg({', '.join(ARGUMENTS)})")
    return lacks + [f"Msg({name}=…)" for name in ("_client", "_sid") if name not in inspect.signature(Msg).parameters]


def identity_of(settings: NatsSettings) -> dict[str, Any]:
    """Client options for login and TLS. Raises ConfigError."""
    options: dict[str, Any] = {}
    if settings.credentials:
        login = read_login(settings.credentials)
        options |= {"user": login.user, "password": login.password, "inbox_prefix": inbox_of(login.user)}
    if settings.url.startswith("tls://"):
        options["tls"] = client_context(settings.tls)
    return options


def why_not(error: BaseException, url: str, user: str | None) -> str:
    """The reason that there is no connection, without secrets."""
    if "authorization" in str(error).lower():
        who = f"user {user!r}" if user else "a client without credentials"
        return f"NATS at {_address(url)} refuses {who}: correct --nats-credentials"
    return f"no NATS server at {_address(url)}: {text_of(error)}"


def _address(url: str) -> str:
    """The URL without credentials."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 4222}"
