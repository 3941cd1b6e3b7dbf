"""Every message on the bus, with its direction and its promise.

A message is a msgpack map and carries the protocol version `v`. Fields are only ever added, with defaults; unknown fields are
ignored; types and names never change. Token ids travel packed (`blocks.pack_tokens`). Times are *remaining* or elapsed
milliseconds, never wall-clock instants: hosts' clocks differ.

    base      the protocol's version, and the head of each message about a request
    jobs      gateway -> worker: what to compute, what a worker must be able to do for it; claims, and how it ended
    handoff   prefill worker <-> decode worker: leases and manifests
    pooling   gateway -> worker: texts whose vectors or scores are asked for, and these
    pulls     worker <-> worker: cached blocks that their receiver asks for
    frames    worker -> gateway: tokens; gateway -> worker: resend, received, cancel
    states    heartbeats
    control   orders to a worker
    codec     one union and one decoder for each receiver
    speakers  whose word a message is
    arrivals  what a process lets in
"""

from common.messages.base import (
    MAX_PROTOCOL_VERSION,
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AttemptMessage,
    WorkerMessage,
)
from common.messages.codec import (
    FromGateway,
    FromPeer,
    GatewayReply,
    ToGateway,
    ToWorker,
    WorkerReply,
    decode,
    encode,
    frame_decoder,
    from_gateway_decoder,
    from_peer_decoder,
    from_planner_decoder,
    gateway_reply_decoder,
    gateway_state_decoder,
    host_reply_decoder,
    host_state_decoder,
    job_decoder,
    planner_state_decoder,
    pool_decoder,
    pooled_decoder,
    to_gateway_decoder,
    to_host_decoder,
    to_worker_decoder,
    worker_reply_decoder,
    worker_state_decoder,
)
from common.messages.control import Ack, Drain, RolesReply, SetRoles, Unload
from common.messages.frames import ANYBODY_THERE, Cancel, Frame, PromptLogprobs, Received, Resend, TokenLogprobs, Tokens
from common.messages.handoff import (
    Dial,
    DialReply,
    Handoff,
    HandoffReply,
    Imported,
    LeaseAborted,
    RankRegion,
    Region,
    Reserve,
    ReserveAgain,
    ReserveReply,
    WriterDone,
)
from common.messages.jobs import (
    GRAMMAR_LIMITS,
    MAX_GRAMMAR_CHARS,
    NO_GOAL,
    NO_KEEP,
    Claim,
    ClaimReply,
    Failed,
    Feature,
    Generate,
    Goal,
    Grammar,
    Job,
    Keep,
    SamplingParams,
    Settle,
    SettleReply,
    Trying,
    features_of,
)
from common.messages.pooling import MAX_POOLED_INPUTS, Pool, Pooled
from common.messages.pulls import PullBlocks, PullReply, StopPull
from common.messages.states import (
    AGE_BOUNDS_S,
    DRAFT_POSITIONS,
    INCARNATION_BITS,
    Ages,
    EvictedBlocks,
    GatewayState,
    HostedModel,
    HostState,
    HostTierTotals,
    ModelLevels,
    ModelLoad,
    PlannerState,
    PullTotals,
    TenantPlaces,
    Want,
    WorkerState,
    WorkerTotals,
    said_features,
)
from common.pages import KVGroup, KVLayout, PagePart

__all__ = [
    "AGE_BOUNDS_S", "ANYBODY_THERE", "DRAFT_POSITIONS", "GRAMMAR_LIMITS", "INCARNATION_BITS", "MAX_GRAMMAR_CHARS",
    "MAX_POOLED_INPUTS", "MAX_PROTOCOL_VERSION", "MIN_PROTOCOL_VERSION", "NO_GOAL", "NO_KEEP", "PROTOCOL_VERSION",
    "Ack", "Ages", "AttemptMessage", "Cancel", "Claim", "ClaimReply", "Dial", "DialReply", "Drain", "EvictedBlocks",
    "Failed", "Feature", "Frame", "FromGateway", "FromPeer", "GatewayReply", "GatewayState", "Generate", "Goal",
    "Grammar", "Handoff", "HandoffReply", "HostState", "HostTierTotals", "HostedModel", "Imported", "Job", "KVGroup",
    "KVLayout", "Keep", "LeaseAborted", "ModelLevels", "ModelLoad", "PagePart", "PlannerState", "Pool", "Pooled",
    "PromptLogprobs", "PullBlocks", "PullReply", "PullTotals", "RankRegion", "Received", "Region", "Resend", "Reserve",
    "ReserveAgain", "ReserveReply", "RolesReply", "SamplingParams", "SetRoles", "Settle", "SettleReply", "StopPull",
    "TenantPlaces", "ToGateway", "ToWorker", "TokenLogprobs", "Tokens", "Trying", "Unload", "Want",
    "WorkerMessage", "WorkerReply", "WorkerState", "WorkerTotals", "WriterDone", "decode", "encode", "features_of",
    "frame_decoder", "from_gateway_decoder", "from_peer_decoder", "from_planner_decoder", "gateway_reply_decoder",
    "gateway_state_decoder", "host_reply_decoder", "host_state_decoder", "job_decoder", "planner_state_decoder",
    "pool_decoder", "pooled_decoder", "said_features", "to_gateway_decoder", "to_host_decoder", "to_worker_decoder",
    "worker_reply_decoder", "worker_state_decoder",
]  # fmt: skip
