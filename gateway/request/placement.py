"""Placement decisions, with their reasons, and the reasons against workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """The reason for a placement, as named in metrics and traces."""

    PREFIX = "prefix"
    LOAD = "load"
    FULL = "full"  # no decode worker has room, so the request waits for one
    LOCAL_SHORT = "local: short"
    LOCAL_EARLIER = "local: earlier"
    LOCAL_SAME_WORKER = "local: same worker"
    LOCAL_NO_PREFILL = "local: no prefill worker"
    HEARTBEATS_LOAD = "without redis: load"
    HEARTBEATS_FULL = "without redis: full"
    HEARTBEATS_LOCAL_SHORT = "without redis: local: short"
    HEARTBEATS_LOCAL_SAME_WORKER = "without redis: local: same worker"
    HEARTBEATS_LOCAL_NO_PREFILL = "without redis: local: no prefill worker"
    OTHER = "other"  # a newer release's functions gave an unknown reason

    @classmethod
    def _missing_(cls, value: object) -> Reason:
        return cls.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`decode` empty: the prefill worker decodes as well."""

    prefill: str
    decode: list[str]
    reason: Reason
    prefill_incarnation: int = 0
    matched_blocks_prefill: int = 0
    matched_blocks_decode: int = 0
    holder: str = ""  # from whom the prefill worker should pull
    holder_blocks: int = 0  # how many blocks of the prompt that one has
    costs: dict[str, float] = field(default_factory=dict, compare=False)  # the compared figures: see `place.lua`


@dataclass(frozen=True, slots=True)
class Charged:
    """The charges of an attempt, to be released. `workers` may have them, should Redis have lost its record."""

    request_id: str
    attempt: int
    stages: tuple[str, ...]  # "prefill", "decode"
    workers: tuple[str, ...] = ()


class Unlike(StrEnum):
    """The kind of a worker's difference, a label in metrics."""

    NAME = "name"
    HASHES = "hashes"
    MODEL = "model"
    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"
    BLOCKS = "blocks"
    TRANSPORT = "transport"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The reason that a ready worker gets no new work here, as `text` with the remedy. `model` is its name at this gateway."""

    worker: str
    incarnation: int
    model: str
    decodes: bool
    what: Unlike
    text: str
