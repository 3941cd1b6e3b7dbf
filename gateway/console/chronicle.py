"""The fleet's history: a bounded list of events, lost workers, outages; pure.

It compares what is heard now with what was heard before. Each gateway writes its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_EVENTS = 200
MAX_LOST = 100
LOST_FOR_S = 600.0  # how long a lost worker is shown
QUIET_S = 30.0  # refusals further apart are separate events

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Event:
    """`level`: "good", "info", "warn" or "bad"."""

    id: int
    at_unix: float
    kind: str  # worker, role, drain, gateway, outage, refused
    level: str
    what: str  # a worker's or a gateway's name, or ""
    text: str
    until_unix: float | None = None  # the last sign of a lasting event
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The fleet as a gateway hears it at one instant."""

    workers: Mapping[str, Json]  # as `worker_json`, by id
    gateways: frozenset[str]
    not_ready: str  # why no request is served, or ""
    refused: int  # since the start
    refused_why: str  # reason of the newest


class Chronicle:
    """The events of one gateway."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._next = 1
        self._before: Heard | None = None
        self._lost: dict[str, Json] = {}
        self._refusal: Event | None = None
        self._was_ready = False
        self.not_ready_since: float | None = None

    def look(self, heard: Heard, unix: float) -> None:
        """Record the changes since the last look. The first one only takes the initial state."""
        before, self._before = self._before, heard
        self._lost = {name: one for name, one in self._lost.items() if unix - one["lost_unix"] < LOST_FOR_S}
        self._readiness(heard.not_ready, unix)
        if before is None:
            return
        for name in sorted(before.workers.keys() | heard.workers.keys()):
            self._worker(name, before.workers.get(name), heard.workers.get(name), unix)
        for name in sorted(before.gateways - heard.gateways):
            self._add(unix, "gateway", "warn", name, "gateway is no longer heard")
        for name in sorted(heard.gateways - before.gateways):
            self._add(unix, "gateway", "info", name, "gateway joined")
        if heard.refused > before.refused:
            self._refused(heard.refused - before.refused, heard.refused_why, unix)

    def as_json(self) -> list[Json]:
        """Events, newest first."""
        return [asdict(event) for event in reversed(self._events)]

    def lost(self) -> list[Json]:
        """Lost workers in their last state, with `lost_unix`; by name."""
        return [one for _, one in sorted(self._lost.items())]

    # -- what may happen -----------------------------------------------------------------------------------------------

    def _readiness(self, reason: str, unix: float) -> None:
        if reason and self.not_ready_since is None:
            self.not_ready_since = unix
            if self._was_ready:
                self._add(unix, "outage", "bad", "", f"no request is served: {reason}")
        elif not reason and self.not_ready_since is not None:
            text = f"requests are served again, after {_length(unix - self.not_ready_since)}"
            self._add(unix, "outage", "good", "", text if self._was_ready else "requests are served")
            self.not_ready_since = None
        self._was_ready = self._was_ready or not reason

    def _worker(self, name: str, before: Json | None, now: Json | None, unix: float) -> None:
        if now is None:
            assert before is not None
            self._gone(name, before, unix)
        elif before is None:
            self._came(name, now, unix)
        elif before["incarnation"] != now["incarnation"]:
            self._add(unix, "worker", "warn", name, "restarted")
        else:
            self._changed(name, before, now, unix)

    def _gone(self, name: str, before: Json, unix: float) -> None:
        if before["status"] == "draining":
            self._add(unix, "worker", "info", name, "left, after draining")
            return
        self._add(unix, "worker", "bad", name, f"lost ({' and '.join(before['roles'])})")
        self._lost[name] = before | {"lost_unix": unix}
        if len(self._lost) > MAX_LOST:
            del self._lost[min(self._lost, key=lambda one: self._lost[one]["lost_unix"])]

    def _came(self, name: str, now: Json, unix: float) -> None:
        lost = self._lost.pop(name, None)
        if lost is None:
            self._add(unix, "worker", "good", name, f"joined ({' and '.join(now['roles'])})")
            return
        same = lost["incarnation"] == now["incarnation"]
        how = "is heard again" if same else "is back, restarted,"
        self._add(unix, "worker", "good", name, f"{how} after {_length(unix - lost['lost_unix'])}")

    def _changed(self, name: str, before: Json, now: Json, unix: float) -> None:
        if sorted(before["roles"]) != sorted(now["roles"]):
            text = f"role moved: {' and '.join(sorted(before['roles']))} → {' and '.join(sorted(now['roles']))}"
            self._add(unix, "role", "info", name, text)
        if before["status"] != now["status"]:
            words = {"draining": ("warn", "drains: no new work"), "ready": ("good", "takes work")}
            level, text = words.get(now["status"], ("info", f"is {now['status']}"))
            self._add(unix, "drain", level, name, text)

    def _refused(self, more: int, why: str, unix: float) -> None:
        event = self._refusal
        if event is None or event not in self._events or unix - (event.until_unix or event.at_unix) > QUIET_S:
            self._refusal = self._add(unix, "refused", "warn", "", why, count=more)
            self._refusal.until_unix = unix
            return
        event.count += more
        event.until_unix, event.text = unix, why

    def _add(self, unix: float, kind: str, level: str, what: str, text: str, *, count: int = 1) -> Event:
        event = Event(id=self._next, at_unix=round(unix, 3), kind=kind, level=level, what=what, text=text, count=count)
        self._next += 1
        self._events.append(event)
        return event


def _length(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
