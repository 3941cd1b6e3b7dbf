"""A process's name on the bus: generated if none is given, refused while in use, yielded to an older process.

The bus alone decides, because Redis may be away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from common.errors import NobodyListensError, UnavailableError
from common.messages import INCARNATION_BITS, GatewayState, WorkerState
from common.settings import ConfigError

if TYPE_CHECKING:  # names can be generated without a bus
    from common.bus import Bus

log = logging.getLogger("baton.names")

TAG = r"[0-9a-f]{6}"
HOST_CHARS = 40  # ids have at most 64
ANSWER_S = 0.5
ASK_AGAIN_S = 0.1
LEASE_S = 3.0  # a silent holder is dead after this
RIVAL_BEATS, RIVAL_S = 3, 1.0  # a message delayed past its sender's death is no rival
MAX_RIVALS = 8
FRACTION_BITS = 8  # ties between equally large groups go to the older worker

Beat = WorkerState | GatewayState


def made_up(kind: str, tag: str = "") -> str:
    """Generate a name like `prefill-gpu7-3fa29c`: role, host, and a tag, random unless given."""
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname().partition(".")[0])[-HOST_CHARS:]
    return "-".join(part for part in (kind, host.strip("-"), tag or made_up_tag()) if part)


def made_up_tag() -> str:
    return secrets.token_hex(3)


def new_incarnation() -> int:
    """Return a new incarnation number: seconds, `FRACTION_BITS` of their fraction, random bits. Later ones are larger."""
    seconds, ns = divmod(time.time_ns(), 10**9)
    chance = INCARNATION_BITS - FRACTION_BITS
    fraction = (ns << FRACTION_BITS) // 10**9
    return seconds << INCARNATION_BITS | fraction << chance | secrets.randbits(chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A process's name, and the subjects at which its holder answers and beats."""

    id: str
    incarnation: int
    flag: str
    beats: str  # subject
    beat_decoder: msgspec.msgpack.Decoder[Any]
    ask: Callable[
        [], Awaitable[object]
    ]  # asks the holder; raises NobodyListensError, or UnavailableError without an answer

    @property
    def taken(self) -> ConfigError:
        remedy = f"stop that one, or give this one a name of its own with {self.flag}"
        return ConfigError(f"the name {self.id!r} is taken: another process on this bus has it; {remedy}")


class Rivals:
    """Other processes heard under this one's name. Without I/O; `clock` in seconds."""

    def __init__(self, name: Name, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._heard: dict[int, list[float]] = {}  # incarnation -> its first heartbeats and the last one

    @property
    def any(self) -> bool:
        return bool(self._heard)

    def saw(self, beat: Beat) -> None:
        """Take a heartbeat under the name, ours included."""
        if beat.incarnation == self._name.incarnation:
            return
        if isinstance(beat, WorkerState) and beat.status.is_gone:
            self._heard.pop(beat.incarnation, None)
            return
        now = self._clock()
        self._heard = {rival: beats for rival, beats in self._heard.items() if now - beats[-1] < LEASE_S}
        recent = self._heard.get(beat.incarnation, [])
        if recent or len(self._heard) < MAX_RIVALS:
            self._heard[beat.incarnation] = [*recent[:RIVAL_BEATS], now]

    @property
    def living(self) -> list[int]:
        """Incarnations with a steady heartbeat."""
        now = self._clock()
        return [
            incarnation
            for incarnation, beats in self._heard.items()
            if len(beats) >= RIVAL_BEATS and beats[-1] - beats[0] >= RIVAL_S and now - beats[-1] < LEASE_S
        ]


async def refuse_taken(name: Name, rivals: Rivals) -> None:
    """Return if the name is free. Raises ConfigError if its holder answers or beats.

    NATS tells at once of a killed holder. One whose host vanished is waited for: `LEASE_S`.
    """
    give_up_at = time.monotonic() + LEASE_S
    while time.monotonic() < give_up_at and not rivals.any:
        try:
            await name.ask()
        except NobodyListensError:
            return
        except UnavailableError:
            await asyncio.sleep(ASK_AGAIN_S)
        else:
            raise name.taken
    if rivals.any:
        raise name.taken
    log.warning("name.holder_silent", extra={"id": name.id, "waited_s": LEASE_S})


@contextlib.asynccontextmanager
async def held(bus: Bus, name: Name) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Context manager: hold the name; yields the check to repeat before anything is answered under it.

    Two may begin at the same instant, or meet when a divided bus is whole again: the younger one ends, with ConfigError.
    """
    rivals = Rivals(name)
    listening = await bus.subscribe(name.beats, name.beat_decoder, rivals.saw)
    owner = asyncio.current_task()
    assert owner is not None
    lost = asyncio.Event()
    watching = asyncio.create_task(_watch(name, rivals, owner, lost))
    try:
        await refuse_taken(name, rivals)
        yield lambda: refuse_taken(name, rivals)
    except asyncio.CancelledError:
        if not lost.is_set():
            raise
        owner.uncancel()
        raise name.taken from None
    finally:
        watching.cancel()
        await listening.close()


async def _watch(name: Name, rivals: Rivals, owner: asyncio.Task[Any], lost: asyncio.Event) -> None:
    """Cancel the owner if an older process has the name."""
    named = set[int]()
    while True:
        await asyncio.sleep(RIVAL_S / 4)
        living = rivals.living
        if any(incarnation < name.incarnation for incarnation in living):
            log.critical("name.lost", extra={"id": name.id, "remedy": name.flag})
            lost.set()
            owner.cancel()
            return
        for incarnation in set(living) - named:
            named.add(incarnation)
            log.error("name.contested", extra={"id": name.id, "remedy": f"another process has it: {name.flag}"})
