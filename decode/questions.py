"""Questions for room that have no lease yet, kept so that their writers ask again without the job."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from common.messages import Cancel, Reserve, ReserveAgain

ASKED_AGAIN_S = 5.0  # a writer that stops asking for this long waits no more
MAX_KEPT_BYTES = 32 << 20  # prompt tokens; a forgotten writer sends its job again

# The key of a job: the writer's process, the request and the attempt.
_Name = tuple[str, int, str, int]


class Questions:
    """The latest questions of writers that wait, up to a bound. No I/O, no clock."""

    def __init__(self, *, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Name, tuple[Reserve, float]] = OrderedDict()  # and when each was last asked
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, question: Reserve, now: float) -> None:
        """Remember a question that its writer will ask again, and for a while once that has its answer."""
        self._forget(_name_of(question))
        self._kept[_name_of(question)] = question, now
        self._bytes += len(question.job.token_ids)
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def find(self, again: ReserveAgain) -> Reserve | None:
        """The whole question as it stands now; None once it is forgotten."""
        question, _ = self._kept.get(_name_of(again), (None, 0.0))
        return question and msgspec.structs.replace(question, remaining_ms=again.remaining_ms)

    def taken_back(self, message: Cancel) -> None:
        """A writer takes its questions for a request back."""
        theirs = (message.worker, message.request_id)
        for name in [name for name in self._kept if (name[0], name[2]) == theirs and name[3] <= message.attempt]:
            self._forget(name)

    def look_after(self, now: float) -> None:
        """Forget those that were not asked again."""
        for name in [name for name, (_, asked_at) in self._kept.items() if now - asked_at > ASKED_AGAIN_S]:
            self._forget(name)

    def _forget(self, name: _Name) -> None:
        question, _ = self._kept.pop(name, (None, 0.0))
        self._bytes -= len(question.job.token_ids) if question is not None else 0


def _name_of(asked: Reserve | ReserveAgain) -> _Name:
    about = asked.job if isinstance(asked, Reserve) else asked
    return asked.worker, asked.incarnation, about.request_id, about.attempt
