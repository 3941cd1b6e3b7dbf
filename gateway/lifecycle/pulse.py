"""The liveness of the workers that have this gateway's requests. No I/O, no clock.

A decoding worker sends something with every step, and each worker beats twice a second. A worker that was not heard for a moment
is asked directly, without waiting for its lease:

- **gone**: the bus says that nobody listens under its name, and still says so after the time to reconnect.
- **silent**: it decodes and listens, but leaves two questions unanswered while others are heard. On busy processors an answer
  gets more time: by how slow the last ones were, and how late this gateway was.

Both may be wrong. Moving a request that was not lost costs a prefill, never a token, because the old attempt is fenced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from common.peers import DEAD_AFTER_S

FRAME_SILENT_S = 0.25  # limit for a worker that decodes
BEAT_SILENT_S = 0.6  # limit for other workers: a heartbeat is missing
GONE_AFTER_S = 0.3  # reconnecting takes at most 0.2 s
MAX_UNANSWERED = 2
MIN_ANSWER_S, MAX_ANSWER_S = 0.5, 2.0
FORGET_AFTER_S = 60.0  # late messages may revive lost workers: drop them after this
ANSWER_HEADROOM = 4  # multiple of the slowest recent reply
SLOWNESS_DECAY = 0.9  # weight of a slow reply after each further one


class Verdict(Enum):
    """The meaning of an unanswered question."""

    WAIT = "wait"
    SILENT = "the worker doesn't answer"
    GONE = "the worker is gone"


@dataclass(slots=True, eq=False)
class _Beat:
    heard_at: float
    asked_at: float | None = None  # a question is outstanding
    decodes: bool = False
    unanswered: int = 0
    nobody_since: float | None = None  # since when nobody listens


class Pulse:
    """The last message of each worker, and its outstanding question."""

    def __init__(self) -> None:
        self._beats: dict[str, _Beat] = {}
        self._slow_s = 0.0  # estimated duration of a reply

    def __len__(self) -> int:
        return len(self._beats)

    def heard(self, worker: str, now: float) -> None:
        beat = self._beat_of(worker, now)
        beat.heard_at, beat.unanswered, beat.nobody_since = now, 0, None

    def is_fresh(self, worker: str, now: float) -> bool:
        """True if it was heard lately: its loss is more than silence."""
        beat = self._beats.get(worker)
        return beat is not None and now - beat.heard_at < DEAD_AFTER_S

    def forget(self, worker: str) -> None:
        self._beats.pop(worker, None)

    def pardon(self, now: float) -> None:
        """Reset the timers: this gateway was suspended or cut off, so silence proves nothing."""
        for worker in self._beats:
            self.heard(worker, now)

    @property
    def answer_s(self) -> float:
        """Timeout of a reply."""
        return min(MAX_ANSWER_S, max(MIN_ANSWER_S, ANSWER_HEADROOM * self._slow_s))

    def was_late(self, seconds: float) -> None:
        """Account for this gateway's own delay, which delays replies as well."""
        self._slow_s = max(seconds, SLOWNESS_DECAY * self._slow_s)

    def ask(self, worker: str, now: float, *, decodes: bool) -> bool:
        """Return True if the worker is to be asked now. The caller asks, and reports the outcome."""
        beat = self._beat_of(worker, now)
        silent_s = FRAME_SILENT_S if decodes else BEAT_SILENT_S
        if beat.asked_at is not None or now - beat.heard_at <= silent_s:
            return False
        beat.asked_at, beat.decodes = now, decodes
        return True

    def answered(self, worker: str, now: float) -> None:
        """Record a reply."""
        _, asked_at = self._done(worker)
        if asked_at is not None:
            self.was_late(now - asked_at)
        self.heard(worker, now)

    def nobody_listens(self, worker: str, now: float) -> Verdict:
        """Record that the bus has no listener for it."""
        beat, _ = self._done(worker)
        if beat is None:
            return Verdict.WAIT
        beat.nobody_since = now if beat.nobody_since is None else beat.nobody_since
        return Verdict.GONE if now - beat.nobody_since >= GONE_AFTER_S else Verdict.WAIT

    def no_answer(self, worker: str) -> Verdict:
        """Record a timeout. It counts only if streams wait, and another worker was heard since the question."""
        beat, asked_at = self._done(worker)
        if beat is None or asked_at is None or beat.heard_at > asked_at or not beat.decodes:
            return Verdict.WAIT
        beat.unanswered += _heard_since(asked_at, (other for other in self._beats.values() if other is not beat))
        return Verdict.SILENT if beat.unanswered >= MAX_UNANSWERED else Verdict.WAIT

    def _beat_of(self, worker: str, now: float) -> _Beat:
        if worker not in self._beats:
            self._beats = {name: beat for name, beat in self._beats.items() if now - beat.heard_at < FORGET_AFTER_S}
            self._beats[worker] = _Beat(now)
        return self._beats[worker]

    def _done(self, worker: str) -> tuple[_Beat | None, float | None]:
        """End the question; return the incarnation asked, and when."""
        beat = self._beats.get(worker)
        if beat is None:
            return None, None
        asked_at, beat.asked_at = beat.asked_at, None
        return beat, asked_at


def _heard_since(instant: float, beats: Iterable[_Beat]) -> bool:
    return any(beat.heard_at > instant for beat in beats)
