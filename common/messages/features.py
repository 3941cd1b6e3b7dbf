"""Features of workers: what a heartbeat says, what a job needs, and the words for both."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from common.messages.jobs import Work


class Feature(StrEnum):
    """A capability that a worker may lack: one of release 0.1.0 has none of these, and would ignore what needs it.

    A new one is a member here, and a line in `NEEDED` if jobs ask for it. Heartbeats then say it, and gateways and prefill
    workers keep those jobs from workers that don't: placement compares words and knows none of them.
    """

    NAMED = "named"  # speaks and listens on subjects with its name
    GRAMMARS = "grammars"  # follows `Job.grammar`
    TYPICAL_P = "typical_p"  # follows `SamplingParams.typical_p`


NEEDED: dict[str, Callable[[Work], bool]] = {
    Feature.GRAMMARS: lambda work: work.grammar is not None,
    Feature.TYPICAL_P: lambda work: work.sampling.typical_p < 1.0,
}


def features_of(work: Work) -> frozenset[str]:
    """The features of the workers that may do this."""
    return frozenset(feature for feature, is_needed in NEEDED.items() if is_needed(work))
