"""Micro-batches of a model in stages: a pass has a part of the streams, so that each stage computes another one.

A stream's next token needs the one before, which comes out of the last stage. Its pass goes through them meanwhile, and those
of the other streams behind it. A few streams stay together: a pass of one row takes nearly as long as one of several.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from weakref import WeakKeyDictionary

from decode.pacing import UNDIVIDED, Division
from decode.request import DecodeRequest
from engine.sequence import Sequence
from worker.context import Passes

# With fewer rows it is the reading of weights that takes a pass's time.
LEAST_ROWS = 4


def parts_of(stages: int, streams: int) -> int:
    """Return the number of passes among which so many streams are divided."""
    return max(1, min(stages, streams // LEAST_ROWS))


class MicroBatches:
    """The division of streams among as many passes as there are stages."""

    are_several = True

    def __init__(self, stages: int, in_flight: Callable[[], int]) -> None:
        """`in_flight()`: passes, others' included."""
        self._stages, self._in_flight = stages, in_flight
        self._passes = 0
        self._last = WeakKeyDictionary[Sequence, int]()  # each sequence's last pass

    @classmethod
    def of(cls, passes: Passes) -> Division:
        """Those of a worker's passes; without stages there are none."""
        return cls(passes.stages, passes.in_flight) if passes.stages > 1 else UNDIVIDED

    def of_next(
        self, candidates: ListOf[DecodeRequest], running: ListOf[DecodeRequest], *, others_wait: bool
    ) -> list[DecodeRequest]:
        """The candidates without the streams of later passes: those that waited longest go first.

        `running`: all, of which some are in flight. Their tokens are known, unless only the last pass is in flight and nobody
        else has work, nor `others_wait`: then the next one begins with what it samples, and would keep others from the stages.
        """
        prompts = [one for one in candidates if one.is_prompt]
        streams = sorted(
            (one for one in candidates if not one.is_prompt), key=lambda one: self._last.get(one.sequence, 0)
        )
        most, has_place = self._division([one.sequence for one in running if not one.is_prompt])
        known = [one for one in streams if has_place and not one.sequence.num_pending]
        is_alone = not (known or prompts or others_wait)
        return [*(streams if is_alone and self._in_flight() == 1 else known)[:most], *prompts]

    def _division(self, batch: ListOf[Sequence]) -> tuple[int, bool]:
        """The most streams of a pass, and whether fewer passes with some of them are in flight than there should be."""
        count = parts_of(self._stages, len(batch))
        return -(-len(batch) // count), len({self._last.get(one) for one in batch if one.num_pending}) < count

    def planned(self, sequences: ListOf[Sequence]) -> None:
        """Record the next pass."""
        self._passes += 1
        self._last.update(dict.fromkeys(sequences, self._passes))
