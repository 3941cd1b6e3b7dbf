"""The layout of stored contents: a stream of messages, and a work queue beside it. No I/O."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from common.errors import OverloadedError
from common.subjects import root_of

FULL_RETRY_S = 30.0
WORK_BYTES = 256 << 20


class StoreFullError(OverloadedError):
    """No disk space is left for `what`."""

    code = "insufficient_storage"

    def __init__(self, told: str, *, what: str, remedy: str) -> None:
        message = f"the store of {what} is full ({told}): {remedy}, or try again later"
        super().__init__(message, retry_after_s=FULL_RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A stream and its work queue: names and limits. A stream `BATON_X` has the subjects `baton.x.>`.

    `what` names in messages and logs what is kept, `remedy` is for whoever finds the store full. A subject of work has its kind
    behind the queue's name.
    """

    what: str
    kept: str
    work: str
    kinds: tuple[str, ...]
    store_bytes: int
    keep_s: float
    remedy: str

    @property
    def work_root(self) -> str:
        return root_of(self.work)

    def full(self, told: str) -> StoreFullError:
        return StoreFullError(told, what=self.what, remedy=self.remedy)

    def streams(self) -> tuple[StreamConfig, StreamConfig]:
        kept = StreamConfig(
            name=self.kept,
            subjects=[f"{root_of(self.kept)}.>"],
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,  # new messages never evict acknowledged ones
            max_msgs_per_subject=1,
            max_bytes=self.store_bytes,
            max_age=self.keep_s,
            allow_direct=True,
        )
        work = StreamConfig(
            name=self.work,
            subjects=[f"{self.work_root}.>"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            max_bytes=WORK_BYTES,
        )
        return kept, work


def token_of(tenant: str) -> str:
    """A tenant's name as a token of a subject: names may have dots."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
