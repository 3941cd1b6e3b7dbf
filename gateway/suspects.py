"""Who may have killed its worker, and who did.

All that were with a worker when it died are suspects. They move at once, together; whoever computes them next has one of them
at a time in the device's hands and names it before (`worker.trials`). If that worker dies as well, the one that it named last
killed both, and is given up; the others were only there. Who got further than where its worker died is let go.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.owner import RequestState, Worker

CLEARED_TOKENS = (
    4  # so far beyond what its client had when the worker died: passes overlap, and frames are on their way
)
MANY = 16  # requests of one worker: of more, those that it had computed for long are no suspects, or all would wait for turns
LONG_TOKENS = 8
MOST_DEATHS = 3  # of workers that named nobody: those of an older release
MAX_NAMED = 1_000


@dataclass(frozen=True, slots=True)
class Death:
    """A worker died with a request and `others` besides. One that only fell silent may be alive: that convicts nobody."""

    worker: Worker
    others: int
    is_certain: bool = True


class Suspects:
    """Counts deaths of workers. Not for requests that only waited in a queue."""

    def __init__(self) -> None:
        self._named: dict[Worker, str] = {}  # by incarnation of a worker, the request that it tries

    def trying(self, worker: Worker, request_id: str) -> None:
        """The worker names the suspect of its next pass."""
        self._named.pop(worker, None)
        self._named[worker] = request_id
        while len(self._named) > MAX_NAMED:
            del self._named[next(iter(self._named))]

    def last_named(self, worker: str) -> int:
        """The incarnation of the worker that named somebody last; 0 when none did."""
        return next((one for name, one in reversed(self._named) if name == worker), 0)

    def is_tried_by(self, worker: str, state: RequestState) -> bool:
        """Whether the worker named the request and nothing came of it yet: better wait for the verdict on that worker."""
        return any(name == worker and tried == state.spec.request_id for (name, _), tried in self._named.items())

    def convict(self, state: RequestState, death: Death) -> bool:
        """A worker that worked on `state` died, or seems to have. Whether that was the fault of `state`."""
        state.untried += 1  # in another's company it may be moved as often as that takes
        named = self._named.get(death.worker)
        if named not in (None, state.spec.request_id):
            return False
        state.deaths += 1
        is_new_there = state.next_position - state.began_with < LONG_TOKENS
        state.is_suspect = state.deaths > 1 or death.others < MANY or is_new_there
        state.clear_at = state.next_position + CLEARED_TOKENS
        return death.is_certain and state.deaths >= (2 if named is not None else MOST_DEATHS)

    def heard(self, state: RequestState, sender: Worker | None = None) -> None:
        """It got tokens from `sender`, or ended."""
        request_id = state.spec.request_id
        if sender is not None and self._named.get(sender) == request_id:
            del self._named[sender]  # that pass went well
        if state.deaths == 1 and state.is_over:
            self._named = {worker: named for worker, named in self._named.items() if named != request_id}
        if state.deaths and (state.is_over or state.next_position >= state.clear_at):
            state.deaths, state.is_suspect = 0, False
