"""What the loss of a worker means for its requests."""

from __future__ import annotations

from collections.abc import Callable

from common.peers import Incarnation, Peers
from gateway.admission.capacity import Fleet
from gateway.lifecycle.attempts import Attempts, Why
from gateway.lifecycle.pulse import Pulse
from gateway.lifecycle.running import Running
from gateway.lifecycle.suspects import Death, Suspects
from gateway.request.ends import End
from gateway.request.state import Phase


class Losses:
    """Moves the requests of lost workers, and describes a worker's death."""

    def __init__(
        self,
        *,
        running: Running,
        attempts: Attempts,
        peers: Peers,
        suspects: Suspects,
        pulse: Pulse,
        fleet: Fleet,
        clock: Callable[[], float],
    ) -> None:
        self._running = running
        self._attempts = attempts
        self._peers = peers
        self._suspects = suspects
        self._pulse = pulse
        self._fleet = fleet
        self._clock = clock

    def lost(self, worker: Incarnation, reason: str, *, died: bool) -> None:
        """Start another attempt of everything that the worker had, all at the same time."""
        others = self._running.num_with(worker.worker) - 1
        self._pulse.forget(worker.worker)
        self._fleet.forget(worker.worker)
        was_stopped = self._peers.left(*worker)  # no fault, and the attempt does not count
        for request in self._running:
            if request.state.lost(worker):
                began = request.state.phase is not Phase.QUEUED
                end = End.STOPPED if was_stopped else End.WORKER_LOST if began else End.NOT_BEGUN
                death = Death(worker, others, is_certain=died) if end is End.WORKER_LOST else None
                self._attempts.move_soon(request, Why(end=end, detail=reason, blame=worker.worker, death=death))

    def death_of(self, worker: str, *, is_certain: bool) -> Death:
        """The death of a worker that doesn't answer for a request."""
        is_certain = is_certain and self._pulse.is_fresh(worker, self._clock())
        state = self._peers.states.get(worker)
        number = state.incarnation if state is not None else self._suspects.last_named(worker)
        return Death(Incarnation(worker, number), self._running.num_with(worker), is_certain=is_certain)
