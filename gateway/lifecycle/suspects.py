"""Which requests may have killed their worker, and which one did.

All requests that a worker computed when it died are suspects, and move at once. Their next workers take one suspect at a time
into a pass, and name it first (`worker.device.trials`). If such a worker dies, too, the request that it named last is given up. A
suspect that gets further than where its worker died is cleared.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.peers import Incarnation
from gateway.request.state import RequestState

CLEAR_AFTER_TOKENS = 4  # progress that clears a suspect; > 2 because passes overlap
# If the worker had more requests, only those with few tokens from it are suspects: trials take turns.
FEW_REQUESTS = 16
PROVEN_TOKENS = 8
MAX_UNNAMED_DEATHS = 3  # workers of an older release name no suspect
MAX_NAMED = 1_000


@dataclass(frozen=True, slots=True)
class Death:
    """A worker died with a request and `others` besides. A death that is not certain convicts nobody."""

    worker: Incarnation
    others: int
    is_certain: bool = True


class Suspects:
    """Counts the deaths of workers that computed a request."""

    def __init__(self) -> None:
        self._named: dict[Incarnation, str] = {}  # worker -> id of the request that it tries

    def trying(self, worker: Incarnation, request_id: str) -> None:
        self._named.pop(worker, None)
        self._named[worker] = request_id
        while len(self._named) > MAX_NAMED:
            del self._named[next(iter(self._named))]

    def last_named(self, worker: str) -> int:
        """The incarnation of the worker that named a suspect last; 0: none did."""
        return next((one for name, one in reversed(self._named) if name == worker), 0)

    def is_tried_by(self, worker: str, state: RequestState) -> bool:
        """Whether the worker is still trying the request: better wait for the outcome."""
        return any(name == worker and tried == state.spec.request_id for (name, _), tried in self._named.items())

    def convict(self, state: RequestState, death: Death) -> bool:
        """A worker of `state` died, or seems to have. Whether `state` is to blame."""
        state.untried += 1  # as another request's companion it may move without limit
        named = self._named.get(death.worker)
        if named not in (None, state.spec.request_id):
            return False
        state.deaths += 1
        is_new_there = state.next_position - state.began_with < PROVEN_TOKENS
        state.is_suspect = state.deaths > 1 or death.others < FEW_REQUESTS or is_new_there
        state.clear_at = state.next_position + CLEAR_AFTER_TOKENS
        return death.is_certain and state.deaths >= (2 if named is not None else MAX_UNNAMED_DEATHS)

    def heard(self, state: RequestState, sender: Incarnation | None = None) -> None:
        """It got tokens from `sender`, or ended."""
        request_id = state.spec.request_id
        if sender is not None and self._named.get(sender) == request_id:
            del self._named[sender]  # that pass went well
        if state.deaths == 1 and state.is_over:
            self._named = {worker: named for worker, named in self._named.items() if named != request_id}
        if state.deaths and (state.is_over or state.next_position >= state.clear_at):
            state.deaths, state.is_suspect = 0, False
