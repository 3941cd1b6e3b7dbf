"""Wire values that decide what a process does, and the bound of a draft; no library but the standard one is loaded.

An unknown word (a newer peer's) reads as OTHER, so the rest of the message is still understood.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

MOST_DRAFTED = 32  # tokens of a draft, wherever one is asked for, set or sent


class Word(StrEnum):
    """A value of which a newer peer may know more: an unknown one reads as OTHER, which every kind has."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls("other")


class Role(Word):
    """A kind of work that a worker takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"  # whole texts as vectors and scores, without generating
    OTHER = "other"


class Keeps(Word):
    """The positions for which layers of a KV group keep their contents."""

    ALL = "all"
    WINDOW = "window"  # the last ones, the own one included
    STATE = "state"  # one recurrent state instead
    OTHER = "other"


class WorkerStatus(Word):
    """The stage of a worker's life. Only READY takes new work."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"  # its weights are in host memory, its KV cache is nowhere
    STOPPED = "stopped"  # last heartbeat of a worker that was told to stop
    BROKEN = "broken"  # last heartbeat of a worker whose device failed
    OTHER = "other"

    @property
    def is_gone(self) -> bool:
        """True if the status says that the worker is gone."""
        return self in (WorkerStatus.STOPPED, WorkerStatus.BROKEN)


class HostStatus(Word):
    """The stage of a model at a host."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    PARKED = "parked"  # its workers sleep
    FAILED = "failed"
    OTHER = "other"


class Finish(Word):
    """The reason that a sequence ended with its last token."""

    NONE = ""  # not finished
    STOP = "stop"  # the last token is a stop token, or completes a stop text
    LENGTH = "length"
    OTHER = "other"


class Refusal(StrEnum):
    """A decode worker's reason to refuse a lease or a sequence."""

    NONE = ""  # not refused
    FULL = "full"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"  # another model or pool layout
    CANCELLED = "cancelled"
    HANDED_OVER = "handed over"  # it already has this attempt's sequence
    UNKNOWN_WRITER = "unknown writer"  # the writer's heartbeat has not arrived yet
    STALE = "stale"  # a newer attempt or another lease took its place
    VERIFYING = "verifying"  # an earlier manifest of the request is being checked
    UNKNOWN_JOB = "unknown job"  # it keeps no such question: the writer asks with the job
    INVALID = "invalid"  # the job is invalid for this worker
    EXPIRED = "expired"  # the manifest came after the lease's end
    INCOMPLETE = "incomplete"  # blocks are missing
    DIGEST = "digest"  # a block's bytes are wrong
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Refusal:
        """Parse releases before 0.1.0, which appended the detail: `invalid: max_tokens must be at least 1`."""
        word = str(value).partition(":")[0]
        return next((refusal for refusal in cls if refusal.value == word), cls.OTHER)

    @property
    def is_final(self) -> bool:
        """True if the same worker would refuse again."""
        return self not in (Refusal.FULL, Refusal.UNKNOWN_WRITER, Refusal.VERIFYING, Refusal.UNKNOWN_JOB)
