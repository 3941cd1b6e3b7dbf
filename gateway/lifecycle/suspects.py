"""Suspects: requests that may have killed their worker, and the one that did.

All requests that a worker computed when it died are suspects, and move at once. Their next workers take one suspect at a time
into a pass, and name it first (`worker.device.trials`). If such a worker dies, too, the request that it named last is given up. A
suspect that gets further than where its worker died is cleared.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.peers import Incarnation
from gateway.request.state import RequestState

# If the worker had more requests, only those with few tokens from it are suspects: trials take turns.
FEW_REQUESTS = 16
PROVEN_TOKENS = 8
MAX_UNNAMED_DEATHS = 3  # workers of an older release name no suspect
MAX_NAMED = 1_000
MAX_DEAD = 64  # recent deaths that may turn out to be none


@dataclass(frozen=True, slots=True)
class Death:
    """A worker died with a request and `others` besides. Mere silence convicts nobody."""

    worker: Incarnation
    others: int
    is_certain: bool = True


class Suspects:
    """Counts the deaths of workers that computed a request."""

    def __init__(self) -> None:
        self._named: dict[Incarnation, str] = {}  # worker -> id of the request on trial
        self._dead: dict[Incarnation, list[RequestState]] = {}  # worker -> requests charged with its death

    def trying(self, worker: Incarnation, request_id: str) -> None:
        self._named.pop(worker, None)
        self._named[worker] = request_id
        while len(self._named) > MAX_NAMED:
            del self._named[next(iter(self._named))]

    def last_named(self, worker: str) -> int:
        """The incarnation of the worker that named a suspect last; 0: none did."""
        return next((one for name, one in reversed(self._named) if name == worker), 0)

    def is_tried_by(self, worker: str, state: RequestState) -> bool:
        """True if the worker is still trying the request: better wait for the outcome."""
        return any(name == worker and tried == state.spec.request_id for (name, _), tried in self._named.items())

    def convict(self, state: RequestState, death: Death) -> bool:
        """Judge the death of a worker of `state`, certain or not. Returns True if `state` is to blame."""
        named = self._named.get(death.worker)
        if named not in (None, state.spec.request_id):
            return False
        is_new_there = state.next_position - state.began_with < PROVEN_TOKENS
        is_suspect = state.is_suspect or state.deaths > 0 or death.others < FEW_REQUESTS or is_new_there
        state.suspect()
        state.is_suspect = is_suspect
        if not death.is_certain:
            return False
        state.deaths += 1
        self._dead.setdefault(death.worker, []).append(state)
        while len(self._dead) > MAX_DEAD:
            del self._dead[next(iter(self._dead))]
        return state.deaths >= (2 if named is not None else MAX_UNNAMED_DEATHS)

    def returned(self, worker: Incarnation) -> None:
        """Clear a worker that was thought dead and is heard again: it was cut off, not killed."""
        for state in self._dead.pop(worker, ()):
            state.deaths = max(0, state.deaths - 1)

    @property
    def are_tried(self) -> bool:
        """True if any worker named a suspect and has sent no tokens of it since."""
        return bool(self._named)

    def heard(self, state: RequestState, sender: Incarnation | None = None) -> None:
        """Clear the request: it got tokens from `sender`, or ended."""
        request_id = state.spec.request_id
        if sender is not None and self._named.get(sender) == request_id:
            del self._named[sender]  # the trial was survived
        if state.deaths == 1 and state.is_over:
            self._named = {worker: named for worker, named in self._named.items() if named != request_id}
        if (state.deaths or state.is_suspect) and (state.is_over or state.next_position >= state.clear_at):
            state.deaths, state.harmed, state.is_suspect = 0, 0, False
