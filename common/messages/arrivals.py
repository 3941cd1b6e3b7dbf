"""The filter of arriving messages: unreadable ones, foreign versions and messages in another's name are dropped.

A speaker is the name in a message's subject, to which NATS' permissions bind the sender. A message that names somebody else, or
contradicts itself, is forged: counted and dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from nats.aio.msg import Msg

from common.errors import ForeignVersionError, MalformedMessageError
from common.messages import (
    Cancel,
    Dial,
    Frame,
    GatewayState,
    HostState,
    PlannerState,
    Received,
    Resend,
    Reserve,
    WorkerMessage,
    WorkerState,
    decode,
)
from common.messages.sense import nonsense
from common.subjects import is_id, speaker_of

log = logging.getLogger("baton.bus")

M = TypeVar("M")

MAX_TOLD = 1_000  # subjects and speakers that have a log line already
COMPLAINTS_A_SECOND = 5  # log lines and dead letters about bad messages; all are counted
INBOXES = "_INBOX."  # the prefix of reply subjects


class RateLimit:
    """Limits the number of events a second."""

    def __init__(self, a_second: int) -> None:
        self._a_second = a_second
        self._second = -1
        self._passed = 0

    def allows(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._passed = second, 0
        self._passed += 1
        return self._passed <= self._a_second


class Arrivals:
    """The filter of incoming messages. `bury(raw, reason)` keeps a malformed one."""

    def __init__(self, bury: Callable[[Msg, str], None]) -> None:
        self.malformed = 0
        self.forged = 0
        self._bury = bury
        self._complaints = RateLimit(COMPLAINTS_A_SECOND)
        self._told: set[str] = set()

    def take(self, raw: Msg, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
        """Return the decoded message, or None if it is dropped."""
        try:
            message = decode(decoder, raw.data)
            if isinstance(message, msgspec.Struct) and (why := nonsense(message)):
                raise MalformedMessageError(why)
        except ForeignVersionError as error:  # the peer will keep sending: log once, keep none
            self.malformed += 1
            if self._is_new(f"version {raw.subject}"):
                log.error("bus.version_refused", extra={"subject": raw.subject, "error": error.message})
            return None
        except (MalformedMessageError, RecursionError) as error:  # RecursionError: thousands of nested arrays
            self.malformed += 1
            reason = f"{type(error).__name__}: {error}"[:200]
            if self._complaints.allows():
                log.warning("bus.malformed", extra={"subject": raw.subject, "error": reason})
                self._bury(raw, reason)
            return None
        wrong = contradiction(raw.subject, message) if isinstance(message, msgspec.Struct) else ""
        if raw.reply and not raw.reply.startswith(INBOXES):
            # A reply address elsewhere would let the sender publish with our permissions.
            wrong = wrong or f"it wants its answer on {raw.reply[:64]!r}"
        if wrong:
            self.refuse(raw.subject, wrong)
            return None
        return message

    def refuse(self, subject: str, wrong: str) -> None:
        """Count a forged message; log one line a speaker."""
        self.forged += 1
        if self._is_new(f"speaker {speaker_of(subject) or subject}"):
            log.warning("bus.forged", extra={"subject": subject, "why": wrong})

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._told and len(self._told) < MAX_TOLD
        if is_new:
            self._told.add(name)
        return is_new


def claimed_by(message: msgspec.Struct) -> str | None:
    """The speaker's name in the message's own fields; None if it has none."""
    match message:
        case WorkerMessage() | Dial() | Frame() | Reserve() | WorkerState():
            return message.worker
        case GatewayState():
            return message.gateway
        case PlannerState():
            return message.planner
        case HostState():
            return message.host
        case Resend():
            return message.worker or None
        case Cancel() | Received():
            return getattr(message, "worker", "") or message.gateway or None
    return None


def contradiction(subject: str, message: msgspec.Struct) -> str:
    """Return the fact on which the subject and the message disagree; "" if none."""
    speaker, claimed = speaker_of(subject), claimed_by(message)
    if speaker and claimed is not None and claimed != speaker:
        return f"{speaker} speaks as {claimed[:64]!r}"
    if claimed is not None and not is_id(claimed):
        return f"{claimed[:64]!r} is no id"
    if isinstance(message, WorkerState) and message.region.incarnation != message.incarnation:
        return "its region is another incarnation's"
    if speaker and isinstance(message, Cancel | Received):
        is_told = message.gateway if subject.startswith("baton.order.") else getattr(message, "worker", "")
        return "" if is_told else f"{speaker} ends a request without its name"
    return ""
