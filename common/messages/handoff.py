"""The handoff of a sequence from a prefill worker to a decode worker: lease, manifest, end of the lease."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from common.messages.base import PROTOCOL_VERSION, WorkerMessage
from common.messages.frames import TokenLogprobs
from common.messages.jobs import Job
from common.pages import KVLayout
from common.words import Refusal


class RankRegion(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of one further rank of a worker; its blocks have the numbers of the first rank's."""

    address: dict[str, str]
    layout: KVLayout | None = None  # None: not told, in heartbeats


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a worker's registered pool. `address` is the transport's own (a shm name, host, port and token, ...).

    Whoever has the whole address may write into the pool: it is told to writers alone. Heartbeats and Redis have its public part.
    A worker of several ranks has a pool for each: `layout` and `address` are the first one's.
    """

    transport: str  # "shm", "ucx", "cuda_ipc"
    incarnation: int
    layout: KVLayout
    address: dict[str, str]
    ranks: tuple[RankRegion, ...] = ()  # the further ones

    @classmethod
    def joined(cls, regions: Sequence[Region]) -> Region:
        """Return the region of a worker whose ranks have these."""
        further = tuple(RankRegion(address=one.address, layout=one.layout) for one in regions[1:])
        return replace(regions[0], ranks=further)

    @property
    def each(self) -> list[Region]:
        """The ranks' regions, each as that of a worker of one rank."""
        further = [replace(self, address=one.address, layout=one.layout or self.layout, ranks=()) for one in self.ranks]
        return [replace(self, ranks=()), *further]

    @property
    def public(self) -> Region:
        """The public part of a region: the host it is reachable from, and the lock file that shows its owner is alive."""
        further = tuple(RankRegion(address=_public(one.address)) for one in self.ranks)
        return replace(self, address=_public(self.address), ranks=further)


def _public(address: dict[str, str]) -> dict[str, str]:
    shown = {"file": address.get("life", ""), "reach": address.get("reach", "")}
    return {name: text for name, text in shown.items() if text}


class Dial(msgspec.Struct, frozen=True, kw_only=True, tag="dial"):
    """Prefill -> decode worker, request: ask how to reach the pool. Answered by `DialReply`."""

    v: int = PROTOCOL_VERSION
    worker: str  # the writer
    incarnation: int


class DialReply(msgspec.Struct, frozen=True, kw_only=True, tag="dial_reply"):
    """The receiver's region, so that a link can be opened before a request needs it."""

    region: Region


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Prefill -> decode worker, request: reserve room for the whole job. Answered by `ReserveReply`. Idempotent per attempt."""

    v: int = PROTOCOL_VERSION
    job: Job
    worker: str  # the writer
    incarnation: int
    remaining_ms: int
    layout: KVLayout
    num_ranks: int = 0  # the writer's; 0: it knows no receivers of several

    @property
    def traceparent(self) -> str:
        return self.job.traceparent


class ReserveAgain(WorkerMessage, frozen=True, kw_only=True, tag="reserve_again"):
    """Prefill -> decode worker, request: a `Reserve` that found no room, without its job. Answered as that one."""

    remaining_ms: int


class ReserveReply(msgspec.Struct, frozen=True, kw_only=True, tag="reserve_reply"):
    """A lease on destination blocks, or a refusal."""

    granted: bool
    reason: Refusal = Refusal.NONE
    incarnation: int = 0  # the decode worker's
    lease_id: int = 0
    generation: int = 0
    first_block: int = 0  # blocks [0, first_block) of the prompt are already here, verified
    destination_blocks: bytes = b""  # packed u32: destinations of the other blocks, see `kvtransfer.plan`
    lease_ms: int = 0
    region: Region | None = None
    detail: str = ""  # shown to people
    first_entries: list[int] = []  # the same of each further group of the layout


class Handoff(WorkerMessage, frozen=True, kw_only=True, tag="handoff"):
    """Prefill -> decode worker, request: the manifest, sent after every block was pushed. Answered by `HandoffReply`."""

    decode_incarnation: int
    lease_id: int
    generation: int
    digests: bytes  # packed little-endian u64, one for each pushed block, in order
    first_token: int
    remaining_ms: int
    num_cached_tokens: int = 0  # the prefill worker's prefix hit, for usage and traces
    first_logprobs: TokenLogprobs | None = None  # the first token's, if asked for
    drafts: tuple[int, ...] = ()  # tokens that a draft head expects behind the first one


class HandoffReply(msgspec.Struct, frozen=True, kw_only=True, tag="handoff_reply"):
    """Accepted: the decode worker owns the sequence. Otherwise the lease is over, and `reason` says why."""

    accepted: bool
    reason: Refusal = Refusal.NONE


class Imported(WorkerMessage, frozen=True, kw_only=True, tag="imported"):
    """Decode worker -> gateway, one way: the KV is verified, and this worker decodes the sequence from now on."""

    transferred_blocks: int
    transferred_bytes: int
    reused_blocks: int  # prompt blocks that the decode worker already had
    transfer_ms: float  # reservation granted -> manifest verified


class WriterDone(WorkerMessage, frozen=True, kw_only=True, tag="writer_done"):
    """Prefill -> decode worker, request (`Ack`): the writer gave this lease up; no write is in flight or will follow."""

    lease_id: int
    generation: int


class LeaseAborted(WorkerMessage, frozen=True, kw_only=True, tag="lease_aborted"):
    """Decode -> prefill worker, one way: stop writing under this lease, then answer with `WriterDone`."""

    lease_id: int
    generation: int
    reason: str
