"""Counts and times of choices that ended here, by model, since this gateway started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.words import Finish
from gateway.request.timeline import Timeline


@dataclass(slots=True)
class Tally:
    """One model's tally. Seconds are from a request's receipt."""

    succeeded: int = 0
    succeeded_s: float = 0.0
    waited_s: float = 0.0  # part of `succeeded_s`: until the last attempt was placed
    failed: int = 0  # cancelled ones, too
    failed_s: float = 0.0
    last_unix_ms: int = 0  # end of the newest; 0: none


class Tallies:
    """The tallies of the models with these names: names that clients make up are not counted."""

    def __init__(self, models: Sequence[str]) -> None:
        self._tallies = {name: Tally() for name in models}

    def of(self, model: str) -> Tally:
        return self._tallies.get(model, Tally())

    def observe(self, timeline: Timeline) -> None:
        """Count an ended choice."""
        tally = self._tallies.get(timeline.model)
        if tally is None or timeline.ended_at is None:
            return
        seconds = timeline.ended_at - timeline.received_at
        tally.last_unix_ms = int(time.time() * 1000)
        if timeline.status in (Finish.STOP, Finish.LENGTH):
            attempt = timeline.attempt
            tally.succeeded += 1
            tally.succeeded_s += seconds
            tally.waited_s += attempt.began_at - timeline.received_at if attempt is not None else 0.0
        else:
            tally.failed += 1
            tally.failed_s += seconds
