"""The prompts whose first token can't come in time: computing them would make later prompts late, too."""

from __future__ import annotations

from collections.abc import Iterable

from prefill.request import PrefillRequest
from prefill.stop import Stop
from worker.device.prompt_cost import PromptCost


class InFlight:
    """The prompt tokens of passes in flight, and since when the first of these passes runs."""

    def __init__(self) -> None:
        self._tokens = 0
        self._began_at = 0.0

    def launched(self, tokens: int, now: float) -> None:
        """A pass of so many tokens follows those in flight."""
        if not self._tokens:
            self._began_at = now
        self._tokens += tokens

    def landed(self, tokens: int, now: float) -> None:
        """The first of the passes is over, or a chunk of it: the next one runs."""
        self._tokens -= tokens
        self._began_at = now

    def over_at(self, now: float, cost: PromptCost) -> float:
        """The earliest instant at which a pass planned now begins."""
        return max(now, self._began_at + cost.least_s(self._tokens))


def stop_late(requests: Iterable[PrefillRequest], in_flight: InFlight, cost: PromptCost, now: float) -> None:
    """Give up the requests without a first token whose deadline is over, or will be before the token can come.

    The estimate is the best case, one pass of the prompt alone without context: nobody is given up who could be in time.
    """
    begins_at = in_flight.over_at(now, cost)
    for request in requests:
        if request.first_token is not None or request.stopped:
            continue
        if request.expired:
            request.stop(Stop.DEADLINE)
        elif request.admitted and not request.sequence.num_pending:  # before, nobody knows what is cached of it
            done_at = begins_at + cost.least_s(request.sequence.num_unscheduled)
            if done_at > request.claimed.first_token_by:
                request.stop(Stop.LATE)
