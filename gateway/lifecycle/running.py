"""The requests in flight, and what was heard of their workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import InvalidRequestError
from common.peers import Peers
from gateway.lifecycle.pulse import Pulse
from gateway.lifecycle.suspects import Suspects
from gateway.request.active import ActiveRequest
from gateway.request.state import Phase, RequestState


class Running:
    """Every request between its admission and its end, and the only list of them."""

    def __init__(self) -> None:
        self._requests: dict[str, ActiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterate over a copy: requests may end meanwhile."""
        return iter(list(self._requests.values()))

    def find(self, request_id: str) -> ActiveRequest | None:
        """The request, or None if it is over or unknown."""
        return self._requests.get(request_id)

    def add(self, request: ActiveRequest) -> None:
        """Raises InvalidRequestError if its id is in use."""
        request_id = request.state.spec.request_id
        self.refuse_twin(request_id)
        self._requests[request_id] = request

    def remove(self, request: ActiveRequest) -> bool:
        """True only for the first end."""
        request_id = request.state.spec.request_id
        if self._requests.get(request_id) is not request:
            return False
        del self._requests[request_id]
        return True

    def refuse_twin(self, request_id: str) -> None:
        """Raise InvalidRequestError if this id is in flight."""
        if request_id in self._requests:
            raise InvalidRequestError(f"request {request_id} is running already", param="request_id")

    @property
    def states(self) -> list[RequestState]:
        """The state of each request."""
        return [request.state for request in self._requests.values()]

    def num_with(self, worker: str) -> int:
        """Number of requests that this worker computes now."""
        return sum(state.is_with(worker) for state in self.states)

    def needed_workers(self) -> dict[str, bool]:
        """The workers that requests need now, and whether any of the requests is decoding."""
        needed: dict[str, bool] = {}
        for request in self._requests.values():
            if not request.retrying:
                for worker in request.state.needs:
                    needed[worker] = needed.get(worker, False) or request.state.phase is Phase.DECODING
        return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The state that messages from workers change."""

    running: Running
    pulse: Pulse
    suspects: Suspects
    peers: Peers
