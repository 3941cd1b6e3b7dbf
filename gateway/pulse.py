"""Whether the workers that have this gateway's requests are there. No I/O, no clock.

A worker that decodes says something with every step, and each beats twice a second. One that was not heard for a moment is asked
directly, and nobody waits for its lease:

- **gone**: the bus says at once that nobody listens under its name, and says so again after the time in which a lost connection
  would be there again.
- **silent**: it decodes, listens, and answers two questions not, while others are heard: it stands still, or is cut off. Where
  processors are short an answer gets more time: by how long the last ones took, and how late this gateway itself was.

Both may be wrong; moving a request that was not lost costs a prefill, never a token, because the old attempt is fenced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

FRAME_SILENT_S = 0.25  # of a worker that decodes
BEAT_SILENT_S = 0.6  # of one that computes prompts alone: a heartbeat is missing
GONE_AFTER_S = 0.3  # nobody listens for so long; to connect again takes 0.2 s at most
MAX_UNANSWERED = 2
LEAST_ANSWER_S, MOST_ANSWER_S = 0.5, 2.0
FORGOTTEN_S = 60.0  # who was not heard for so long is lost, and so is what a message of its on the way brought back
PATIENCE = 4  # times the slowest answer lately
FORGETS = 0.9  # a slow answer counts so much less with each that follows


class Verdict(Enum):
    """What to make of a question without an answer."""

    WAIT = "wait"
    SILENT = "the worker doesn't answer"
    GONE = "the worker is gone"


@dataclass(slots=True, eq=False)
class _Beat:
    heard_at: float
    asked_at: float | None = None  # a question is on its way
    decodes: bool = False
    unanswered: int = 0
    nobody_since: float | None = None  # nobody listens


class Pulse:
    """When each worker was last heard, by any message of its own, and what became of the questions to it."""

    def __init__(self) -> None:
        self._beats: dict[str, _Beat] = {}
        self._slow_s = 0.0  # an answer takes so long

    def __len__(self) -> int:
        return len(self._beats)

    def heard(self, worker: str, now: float) -> None:
        """A message of the worker's arrived."""
        beat = self._beat_of(worker, now)
        beat.heard_at, beat.unanswered, beat.nobody_since = now, 0, None

    def forget(self, worker: str) -> None:
        """It is lost."""
        self._beats.pop(worker, None)

    def pardon(self, now: float) -> None:
        """This gateway stood still or was cut off: nobody's silence counts."""
        for worker in self._beats:
            self.heard(worker, now)

    @property
    def answer_s(self) -> float:
        """How long to wait for an answer."""
        return min(MOST_ANSWER_S, max(LEAST_ANSWER_S, PATIENCE * self._slow_s))

    def was_late(self, seconds: float) -> None:
        """This gateway did something so much later than it meant to: answers will be late as well."""
        self._slow_s = max(seconds, FORGETS * self._slow_s)

    def ask(self, worker: str, now: float, *, decodes: bool) -> bool:
        """Whether to ask the worker now; the caller does, and says what came of it."""
        beat = self._beat_of(worker, now)
        silent_s = FRAME_SILENT_S if decodes else BEAT_SILENT_S
        if beat.asked_at is not None or now - beat.heard_at <= silent_s:
            return False
        beat.asked_at, beat.decodes = now, decodes
        return True

    def answered(self, worker: str, now: float) -> None:
        """It is there."""
        _, asked_at = self._done(worker)
        if asked_at is not None:
            self.was_late(now - asked_at)
        self.heard(worker, now)

    def nobody_listens(self, worker: str, now: float) -> Verdict:
        """So says the bus."""
        beat, _ = self._done(worker)
        if beat is None:
            return Verdict.WAIT
        beat.nobody_since = now if beat.nobody_since is None else beat.nobody_since
        return Verdict.GONE if now - beat.nobody_since >= GONE_AFTER_S else Verdict.WAIT

    def no_answer(self, worker: str) -> Verdict:
        """In time. That counts only if streams wait, and the bus brought something of somebody else meanwhile."""
        beat, asked_at = self._done(worker)
        if beat is None or asked_at is None or beat.heard_at > asked_at or not beat.decodes:
            return Verdict.WAIT
        beat.unanswered += _heard_since(asked_at, (other for other in self._beats.values() if other is not beat))
        return Verdict.SILENT if beat.unanswered >= MAX_UNANSWERED else Verdict.WAIT

    def _beat_of(self, worker: str, now: float) -> _Beat:
        if worker not in self._beats:
            self._beats = {name: beat for name, beat in self._beats.items() if now - beat.heard_at < FORGOTTEN_S}
            self._beats[worker] = _Beat(now)
        return self._beats[worker]

    def _done(self, worker: str) -> tuple[_Beat | None, float | None]:
        """The question is over; who was asked, and when."""
        beat = self._beats.get(worker)
        if beat is None:
            return None, None
        asked_at, beat.asked_at = beat.asked_at, None
        return beat, asked_at


def _heard_since(instant: float, beats: Iterable[_Beat]) -> bool:
    return any(beat.heard_at > instant for beat in beats)
