"""Heartbeats of workers, gateways, planners and hosts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from common.messages.base import PROTOCOL_VERSION
from common.messages.handoff import Region
from common.messages.jobs import Feature
from common.words import HostStatus, Role, WorkerStatus

DRAFT_POSITIONS = 16  # counted one by one; few drafts are longer
AGE_BOUNDS_S = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)
INCARNATION_BITS = 30  # random bits, below the second in which the process started
# Builds between release 0.1.0 and `WorkerState.features` say each of these features as a field of its name.
_BOOLS = (Feature.NAMED, Feature.GRAMMARS, Feature.TYPICAL_P)


class HostTierTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of a worker's KV cache below its pool: host memory, or files below that. Without one all is 0."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0  # blocks of tokens that gave way to others
    surplus_blocks: int = 0  # part of them, beyond their tenant's share
    lost_blocks: int = 0  # evicted from the tier above before they were stored
    bad_digests: int = 0  # came back with a wrong byte, and were computed again
    failed_copies: int = 0  # late, or ended by an error
    hit_tokens: int = 0
    load_bytes_per_s: float = 0.0  # as prompts wait for it; 0: not measured


class PullTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a worker asked of peers instead of computing them."""

    pulls: int = 0  # those that brought something
    tokens: int = 0  # found here for it
    blocks: int = 0
    bytes: int = 0
    missed: int = 0  # the peer had nothing more, or could not push
    failed: int = 0  # late, or the peer was lost
    bad_digests: int = 0  # a byte was wrong: computed


class EvictedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Cached blocks of the device that gave way to others, by their standing then."""

    spent: int = 0  # superseded states, and what the lowest tier left
    unused: int = 0
    found: int = 0
    kept: int = 0  # someone asked to keep them
    tenant: int = 0  # beyond their tenant's share


class Ages(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram of cached blocks' ages, of one block in 16: the last count is of those above all bounds."""

    counts: Annotated[list[int], msgspec.Meta(max_length=64)] = []
    sum_s: float = 0.0


class WorkerTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's counters since its start, for metrics."""

    prompt_tokens: int = 0  # prompt tokens looked up in the prefix cache
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    stateless_tokens: int = 0  # behind those: KV was cached, but no state
    generated_tokens: int = 0
    pushed_blocks: int = 0
    pushed_bytes: int = 0
    push_s: float = 0.0  # pushes overlap: bytes / seconds is one push's rate
    preemptions: int = 0
    failed_steps: int = 0
    dropped_inputs: int = 0  # texts that no pool computed: nobody waited
    out_of_memory: int = 0  # part of failed_steps
    refused_handoffs: int = 0  # stale, expired, incomplete or wrong
    bad_digests: int = 0  # part of refused_handoffs: a byte was wrong
    expired_jobs: int = 0  # claimed too late to start
    lost_frames: int = 0  # not accepted by the bus; gateways ask for their tokens again
    malformed: int = 0  # messages that no decoder accepts
    dead_letters: int = 0
    forged: int = 0  # messages in another's name
    pass_s: float = 0.0  # time in which a pass ran
    drafted_tokens: int = 0  # verified ones
    accepted_tokens: int = 0  # part of drafted_tokens
    drafts: int = 0  # each verified in one pass
    accepted_by_position: Annotated[list[int], msgspec.Meta(max_length=64)] = []  # `DRAFT_POSITIONS` at most
    host: HostTierTotals = HostTierTotals()
    disk: HostTierTotals = HostTierTotals()
    evicted: EvictedBlocks = EvictedBlocks()
    lifetime: Ages = Ages()  # from a cached block's first release to its eviction
    idle: Ages = Ages()  # from its last release to its eviction
    reuse: Ages = Ages()  # from a release to the next use
    pulls: PullTotals = PullTotals()
    kept_bytes: int = 0  # handed over to it without being sent: it had them


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="worker_state"):
    """Worker -> everybody, every 500 ms; also the record in Redis. Facts first, then load, then rates."""

    v: int = PROTOCOL_VERSION
    worker: str
    incarnation: int
    roles: list[Role]  # accepting new work; `running` also counts sequences of a role given up
    status: WorkerStatus
    model: str  # served name
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_model_len: int
    region: Region
    parity_hash: bytes = b""  # block hash of the probe prompt; must equal the gateway's (docs/architecture.md)
    steps: int = 0  # passes of the device loop: alive but stuck counts as dead
    busy: bool = False  # a step is running or work is waiting; `steps` must then advance
    running: int = 0  # sequences in the batch
    waiting: int = 0  # claimed or imported, not in the batch
    queued_tokens: int = 0  # prompt tokens claimed and not yet computed
    free_blocks: int = 0  # free or evictable
    held_blocks: int = 0  # under a lease, a hold or in quarantine
    max_sequences: int = 0
    prefill_tokens_per_s: float = 0.0  # exponential average; 0 = not measured, here and below
    decode_step_ms: float = 0.0
    prefill_fixed_ms: float = 0.0  # a pass with a prompt: cost besides its tokens at that rate
    prefill_bare_tokens_per_s: float = 0.0  # rate for tokens without context
    prefill_bare_fixed_ms: float = 0.0  # cost of a pass besides tokens and attention
    prefill_double_tokens: float = 0.0  # context length at which attention doubles a token's cost
    local_tokens_per_s: float = 0.0  # prompt tokens computed beside decoding, within the step target
    link_bytes_per_s: float = 0.0  # the slowest measured link to a decode worker
    totals: WorkerTotals = WorkerTotals()
    grammars: bool = False  # this, `named` and `typical_p`: see `_BOOLS`, and read `can`
    named: bool = False
    typical_p: bool = False
    files_fingerprint: str = ""  # config and weights as stored; "" if not told
    whole_len: int = 0  # above `max_model_len` where the pool holds less
    whole_kv_mb: int = 0  # MiB of KV cache that `whole_len` would need
    features: frozenset[str] = frozenset()  # words of `Feature`, and those of later releases
    drafter: str = ""  # the method of its drafts; "": none
    pull_bytes_per_s: float = 0.0  # speed of pulls; 0: it neither asks nor lends

    @property
    def can(self) -> frozenset[str]:
        """Its features: it may do work with `features_of(work) <= can`."""
        return self.features or frozenset(name for name in _BOOLS if getattr(self, name))


def said_features(*, lacking: Iterable[Feature] = ()) -> dict[str, Any]:
    """The fields of `WorkerState` with the features of this release, but the lacking ones."""
    features = frozenset[str](Feature).difference(lacking)
    return {"features": features} | {name: name in features for name in _BOOLS}


class TenantPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's places of the decode batch at one gateway."""

    held: int = 0  # started requests
    waiting: int = 0  # requests without a place
    tier: int = 1  # 0 low, 1 normal, 2 high: the highest tier that waits
    weight: float = 1.0


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One model's prompts at a gateway, in tokens."""

    waiting_tokens: int = 0  # kept by the gateway
    started_tokens: int = 0  # started, without a first token yet
    unclaimed_tokens: int = 0  # started, not yet claimed by a worker
    tenants: dict[str, TenantPlaces] = {}  # the busiest ones; empty from older releases


class ModelLevels(msgspec.Struct, frozen=True, kw_only=True):
    """One model's part of the fields of `GatewayState` with these names."""

    ttft_met: int = 0
    ttft_count: int = 0
    tpot_met: int = 0
    tpot_count: int = 0
    arriving_tokens_per_s: float = 0.0
    queued_tokens: int = 0
    handing_over: int = 0


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's wish that a model be loaded."""

    keep_s: float  # from now on
    active: bool = False  # requests wait for it, or run


class GatewayState(msgspec.Struct, frozen=True, kw_only=True, tag="gateway_state"):
    """Gateway -> workers and gateways, every second. A worker drops the requests of a gateway that was silent for 5 s.

    Planners read the service levels that a recent window met, and what waits.
    """

    v: int = PROTOCOL_VERSION
    gateway: str
    incarnation: int
    window_s: float = 0.0  # length for the next five fields; 0 = not counted
    ttft_met: int = 0  # first tokens in time
    ttft_count: int = 0  # first tokens, and requests already late
    tpot_met: int = 0  # stream samples (each second, and at the end) within the level
    tpot_count: int = 0
    arriving_tokens_per_s: float = 0.0  # prompt tokens for prefill workers, by their recent share
    queued_requests: int = 0  # no worker has taken them yet
    queued_tokens: int = 0  # their prompt tokens, by the same share
    handing_over: int = 0  # requests that have a first token and no decode worker yet
    waiting_tokens: int = 0  # prompt tokens in the gateway; other gateways' admission reads the three
    started_tokens: int = 0  # prompt tokens started without a first token yet
    unclaimed_tokens: int = 0  # the started ones that no worker has claimed yet
    models: dict[str, ModelLoad] = {}  # the three by model; empty from older releases
    kept_traces: bytes = b""  # 16-byte ids: recently ended requests whose traces tail sampling keeps
    named: bool = False  # speaks and listens on subjects with its name; release 0.1.0 does not
    levels: dict[str, ModelLevels] = {}  # by the workers' name of the model; empty from older releases
    wanted: dict[str, Want] = {}  # by the workers' name of the model; hosts load these


class PlannerState(msgspec.Struct, frozen=True, kw_only=True, tag="planner_state"):
    """Planner -> anybody, with each decision. Of several planners, the one with the smallest name (and incarnation) acts."""

    v: int = PROTOCOL_VERSION
    planner: str
    acts: bool  # False: a dry run, or another planner is active
    workers: dict[str, int]  # workers accepting new work, by role
    desired: dict[str, int]  # target for an autoscaler: workers the load needs, by role
    pressures: dict[str, float]  # load as a share of capacity, by role
    reason: str  # reason of the last decision
    moves: int = 0
    incarnation: int = 0
    models: dict[str, dict[str, int]] = {}  # `desired` by model; the sums are above
    wanted: dict[str, dict[str, int]] = {}  # by model and role, for hosts to follow; steadier


class HostedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a host may load."""

    status: HostStatus = HostStatus.UNLOADED
    for_s: float = 0.0  # age of the status
    reason: str = ""  # why it failed, or what it waits for
    workers: dict[str, list[str]] = {}  # roles of those that run or start here, by name
    spare: dict[str, int] = {}  # workers more that it could start now, by service
    extra: list[str] = []  # those of `workers` that it may stop
    wanted: dict[str, int] = {}  # by role, of all hosts, as the planner says


class HostState(msgspec.Struct, frozen=True, kw_only=True, tag="host_state"):
    """Host -> gateways and hosts, twice a second and with each change: the models that it loads when they are wanted.

    Of several hosts that offer a model, the one with the most room loads it; they decide alike by what each says here.
    """

    v: int = PROTOCOL_VERSION
    host: str
    incarnation: int
    models: dict[str, HostedModel] = {}
    max_loaded: int = 0  # at once; 0: all
    free_places: int = 0  # models that it could load without another one giving way
    free_cards: int = 0  # GPUs of its plan that no loaded model has
    free_bytes: int = 0  # host memory
    shares: bool = False  # it heeds what other hosts say; older releases load whatever is wanted
