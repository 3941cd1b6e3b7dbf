"""Every message on the bus, with its direction and its promise.

Encoding: msgpack maps through msgspec. Compatibility: a message carries `v`; fields are only ever added, with defaults;
unknown fields are ignored; types and names are never changed or reused. Token ids travel packed (`blocks.pack_tokens`).
Times are *remaining* or elapsed milliseconds, never wall-clock instants: hosts' clocks differ.

One union per receiver (`ToWorker`, `ToGateway`), one decoder per union.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from common.errors import ForeignVersionError, MalformedMessageError

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1  # version N understands N-1
MAX_PROTOCOL_VERSION = PROTOCOL_VERSION + 1  # and N+1, which understands N; two versions on, nobody promises anything


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Sampling is a pure function of (logits, seed, position, tokens so far)."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int = 0  # unsigned 64 bit; the gateway always sets one, so that a resumed request continues as it would have
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None = off; k = the chosen token's logprob and the k most likely tokens
    max_tokens: int  # generated tokens at most, of the whole request (not of this attempt)
    min_tokens: int = 0  # stop tokens are banned before this many were generated
    stop_token_ids: list[int] = []  # model's EOS (unless ignore_eos) and the client's; the output has the stop token


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a pool: `kv[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, one contiguous run a block."""

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32", "bfloat16", "float16"

    @property
    def block_elements(self) -> int:
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        return self.block_elements * {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    def compatible_with(self, other: KVLayout) -> bool:
        """Whether blocks can move between the two pools as they are (their sizes may differ)."""
        return msgspec.structs.replace(self, num_blocks=0) == msgspec.structs.replace(other, num_blocks=0)


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer reaches a worker's registered pool. `address` is the transport's own (a shm name, host and port, ...)."""

    transport: str  # "shm", "ucx", "cuda_ipc"
    incarnation: int
    layout: KVLayout
    address: dict[str, str]


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Gateway -> prefill worker, through JetStream. Started only after a granted `Claim`; answered by token frames or `Failed`.

    A resumed request (attempt > 1) carries the tokens that the client already has behind its prompt:
    `token_ids = prompt + generated`, and the next sampled token has position `len(token_ids) - num_prompt_tokens`.
    """

    v: int = PROTOCOL_VERSION
    request_id: str
    attempt: int
    gateway: str
    token_ids: bytes
    num_prompt_tokens: int
    hash_root: bytes
    sampling: SamplingParams
    decode_workers: list[str]  # candidates, best first; empty = the worker that prefills also decodes (local prefill)
    deadline_ms: int  # remaining when published; the claim's reply brings it up to date
    priority: int = 0
    traceparent: str = ""
    suspect_until: int = 0  # it may have killed a worker: until it has so many tokens compute it apart, say `Trying`

    @property
    def context(self) -> str | UnsetType:
        """The `traceparent` of messages about this attempt."""
        return self.traceparent or UNSET


class AttemptMessage(msgspec.Struct, frozen=True, kw_only=True):
    """About one attempt of a request, and so of its trace. Heartbeats, roles and draining are about no request and carry none."""

    v: int = PROTOCOL_VERSION
    request_id: str
    attempt: int
    traceparent: str | UnsetType = UNSET  # W3C, of the attempt's span or its transfer's; not on the wire without


class WorkerMessage(AttemptMessage, frozen=True, kw_only=True):
    """Such a message of a worker's."""

    worker: str
    incarnation: int


class Claim(WorkerMessage, frozen=True, kw_only=True, tag="claim"):
    """Worker -> gateway, request. May this worker start this attempt? Answered by `ClaimReply`. Idempotent."""

    is_held: bool = False  # it was granted to this worker, which asks whether somebody still waits for it


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True, tag="claim_reply"):
    """Not granted: drop the job (`term` it); somebody else owns the request, or nobody wants it any more."""

    granted: bool
    reason: str = ""
    remaining_ms: int = 0


class Settle(WorkerMessage, frozen=True, kw_only=True, tag="settle"):
    """Prefill worker -> gateway, request, after the decode worker accepted the manifest (or the request ended here)."""

    decode_worker: str = ""  # who has it now; empty = ended on the sender
    decode_incarnation: int = 0
    push_ms: float = 0.0  # all pushes together
    late_push_ms: float = 0.0  # what of that was not hidden behind the prefill
    handover_ms: float = 0.0  # first token sampled -> accepted by the decode worker


class SettleReply(msgspec.Struct, frozen=True, kw_only=True, tag="settle_reply"):
    """`ack`: ack the job in JetStream. Otherwise the attempt is stale: `term` the delivery, never ack it."""

    ack: bool


class Failed(WorkerMessage, frozen=True, kw_only=True, tag="failed"):
    """Worker -> gateway, one way. This attempt ended here without an answer; the gateway decides about another."""

    code: str  # `ServingError.code`
    message: str
    retryable: bool
    dead_worker: str = ""  # the decode worker that fell silent with the sequence, when it was that


class Trying(WorkerMessage, frozen=True, kw_only=True, tag="trying"):
    """Worker -> gateway, request (`Ack`): the next pass has this suspect (`Job.suspect_until`) and no other."""


class Imported(WorkerMessage, frozen=True, kw_only=True, tag="imported"):
    """Decode worker -> gateway, one way. The KV was verified; this worker decodes the sequence from now on."""

    transferred_blocks: int
    transferred_bytes: int
    reused_blocks: int  # blocks of the prompt that the decode worker already had
    transfer_ms: float  # reservation granted -> manifest verified


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Prefill -> decode worker, request. Reserve room for the whole job; answered by `ReserveReply`. Idempotent per attempt."""

    v: int = PROTOCOL_VERSION
    job: Job
    worker: str  # the writer
    incarnation: int
    remaining_ms: int
    layout: KVLayout

    @property
    def traceparent(self) -> str:
        return self.job.traceparent


class ReserveReply(msgspec.Struct, frozen=True, kw_only=True, tag="reserve_reply"):
    """A lease on destination blocks, or a refusal with its reason (`full`, `draining`, `incompatible`, `cancelled`)."""

    granted: bool
    reason: str = ""
    incarnation: int = 0  # the decode worker's
    lease_id: int = 0
    generation: int = 0
    first_block: int = 0  # blocks [0, first_block) of the prompt are already there, verified
    destination_blocks: bytes = b""  # packed u32: where blocks [first_block, ceil(tokens / block_size)) go
    lease_ms: int = 0
    region: Region | None = None


class Handoff(WorkerMessage, frozen=True, kw_only=True, tag="handoff"):
    """Prefill -> decode worker, request: the manifest, sent after every run was pushed. Answered by `HandoffReply`."""

    decode_incarnation: int
    lease_id: int
    generation: int
    digests: bytes  # packed little-endian u64, one for each pushed block, in order
    first_token: int
    remaining_ms: int
    num_cached_tokens: int = 0  # the prefill worker's prefix hit, for usage and traces
    first_logprobs: TokenLogprobs | None = None  # of the first token, when asked for


class HandoffReply(msgspec.Struct, frozen=True, kw_only=True, tag="handoff_reply"):
    """Accepted: the decode worker owns the sequence. Else `reason`: `digest`, `stale`, `expired`, `incomplete`, `cancelled`."""

    accepted: bool
    reason: str = ""


class WriterDone(WorkerMessage, frozen=True, kw_only=True, tag="writer_done"):
    """Prefill -> decode worker, request (`Ack`): the writer gave this lease up; no write is in flight and none will follow."""

    lease_id: int
    generation: int


class LeaseAborted(WorkerMessage, frozen=True, kw_only=True, tag="lease_aborted"):
    """Decode -> prefill worker, one way: stop writing under this lease, then answer with `WriterDone`."""

    lease_id: int
    generation: int
    reason: str


class Cancel(AttemptMessage, frozen=True, kw_only=True, tag="cancel"):
    """Gateway -> prefill and decode worker, request (`Ack`). Attempts up to `attempt` must stop; leaves a tombstone.

    Prefill -> a decode worker that did not answer `Reserve`, one way, when the attempt needs it no more.
    """

    reason: str = "client"


class Resend(AttemptMessage, frozen=True, kw_only=True, tag="resend"):
    """Gateway -> the worker that has the request, request (`Ack`): send the tokens from `position` on again, if there are any.

    `Ack.known` says whether the worker still works on the attempt.
    """

    position: int


class Received(AttemptMessage, frozen=True, kw_only=True, tag="received"):
    """Gateway -> worker, one way: every token up to the final one arrived; the worker may forget the stream."""


class SetRoles(msgspec.Struct, frozen=True, kw_only=True, tag="set_roles"):
    """Planner, or whoever operates -> worker, request: take new work of these roles alone. Answered by `RolesReply`. Idempotent.

    What a lost role has begun goes on to its end; what it has not begun goes back to its gateway.
    """

    v: int = PROTOCOL_VERSION
    roles: list[str]
    reason: str = ""  # for the worker's log


class RolesReply(msgspec.Struct, frozen=True, kw_only=True, tag="roles_reply"):
    """Accepted: `roles` take new work from now on. Otherwise nothing changed, and `reason` says why."""

    accepted: bool
    roles: list[str]
    reason: str = ""


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Whoever operates -> worker, request: take no new work until told otherwise, or (`draining` false) take it again.

    Answered by `RolesReply`. Idempotent. What runs goes on to its end, what waits goes back to its gateway, and the roles stay.
    """

    v: int = PROTOCOL_VERSION
    draining: bool = True
    reason: str = ""  # for the worker's log


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """Plain answer. `known` is False when the receiver had nothing to do for this id."""

    known: bool


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural logarithms, of the model's distribution before temperature and penalties."""

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one sequence. `position` counts generated tokens of the whole request from 0, across attempts."""

    request_id: str
    attempt: int
    position: int
    token_ids: bytes
    finish: str = ""  # "", "stop" (the last token is a stop token), "length"
    logprobs: list[TokenLogprobs] = []
    cached_tokens: int = -1  # with the prefill worker's first token: prompt tokens that its prefix cache held
    queue_ms: float = 0.0  # with the first token: claimed -> first chunk started
    prefill_ms: float = 0.0  # with the first token: first chunk started -> token sampled
    traceparent: str | UnsetType = UNSET  # with a worker's first of an attempt: 69 bytes, beside a token's 161


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag="frame"):
    """Worker -> gateway, one way: one a step and gateway, with the new tokens of all of that gateway's sequences."""

    v: int = PROTOCOL_VERSION
    worker: str
    incarnation: int
    tokens: list[Tokens]


class WorkerTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker counted since its start, for metrics."""

    prompt_tokens: int = 0  # that looked for a cached prefix
    cached_tokens: int = 0  # that found one
    generated_tokens: int = 0
    pushed_blocks: int = 0
    pushed_bytes: int = 0
    push_s: float = 0.0  # pushes of different requests overlap: bytes / seconds is what one push got
    preemptions: int = 0
    failed_steps: int = 0
    out_of_memory: int = 0  # of the failed steps
    refused_handoffs: int = 0  # stale, expired, incomplete or wrong
    bad_digests: int = 0  # of them: because a byte was wrong
    expired_jobs: int = 0  # claimed too late to begin
    lost_frames: int = 0  # that the bus did not take; gateways ask for their tokens
    malformed: int = 0  # messages that no decoder accepts
    dead_letters: int = 0


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="worker_state"):
    """Worker -> everybody, every 500 ms; also what the registry in Redis holds. Facts first, then load, then rates."""

    v: int = PROTOCOL_VERSION
    worker: str
    incarnation: int
    roles: list[str]  # those that take new work: "prefill", "decode"; what a lost one still runs counts below
    status: str  # "starting", "ready", "draining"; last words: "stopped", or "broken" when its device computes no more
    model: str  # served name
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_model_len: int
    region: Region
    parity_hash: bytes = b""  # block hash of the probe prompt (see docs/architecture.md); must equal the gateway's
    steps: int = 0  # counter of the device loop: alive but stuck is dead
    busy: bool = False  # a step is running or work is waiting; `steps` must then move
    running: int = 0  # sequences in the batch
    waiting: int = 0  # sequences claimed or imported, not in the batch
    queued_tokens: int = 0  # prompt tokens claimed and not yet computed
    free_blocks: int = 0  # free or evictable
    held_blocks: int = 0  # under a lease, a hold or in quarantine
    max_sequences: int = 0
    prefill_tokens_per_s: float = 0.0  # measured, exponential average; 0 = not measured yet
    decode_step_ms: float = 0.0
    prefill_fixed_ms: float = 0.0  # what a pass with a prompt takes beside its tokens at that rate; measured
    prefill_bare_tokens_per_s: float = 0.0  # of tokens with nothing before them; 0 = not measured
    prefill_bare_fixed_ms: float = 0.0  # what a pass takes beside them and attention
    prefill_double_tokens: float = 0.0  # behind so many, attention makes a token take twice that long; 0 = not measured
    local_tokens_per_s: float = 0.0  # prompt tokens computed beside decoding, within the step target; 0 = not measured
    link_bytes_per_s: float = 0.0  # the slowest measured link of this worker to a decode worker; 0 = not measured
    totals: WorkerTotals = WorkerTotals()


class GatewayState(msgspec.Struct, frozen=True, kw_only=True, tag="gateway_state"):
    """Gateway -> workers and gateways, every second. A worker drops the requests of a gateway that was silent for 5 s.

    Also what planners read: how many requests of a recent window met their service levels, and what waits.
    """

    v: int = PROTOCOL_VERSION
    gateway: str
    incarnation: int
    window_s: float = 0.0  # of the next five; 0 = this gateway doesn't count them
    ttft_met: int = 0  # first tokens in time
    ttft_count: int = 0  # first tokens, and requests that are late already
    tpot_met: int = 0  # samples of streams (one a second and one at the end) with a time per token within the level
    tpot_count: int = 0
    arriving_tokens_per_s: float = 0.0  # prompt tokens for prefill workers, by the share that they computed lately
    queued_requests: int = 0  # no worker has taken them yet
    queued_tokens: int = 0  # of those, by the same share
    handing_over: int = 0  # requests with a first token that no decode worker has yet
    waiting_tokens: int = 0  # prompt tokens that wait in the gateway; with the next two for other gateways' admission
    started_tokens: int = 0  # prompt tokens that were started and have no first token yet
    unclaimed_tokens: int = 0  # of these, those that no worker has claimed yet
    kept_traces: bytes = b""  # ids, 16 bytes each, of requests that ended lately and whose traces are worth sending


class PlannerState(msgspec.Struct, frozen=True, kw_only=True, tag="planner_state"):
    """Planner -> whoever wants to know, with each decision. Of several planners, the one with the smallest name acts."""

    v: int = PROTOCOL_VERSION
    planner: str
    acts: bool  # False: a dry run, or another planner acts
    workers: dict[str, int]  # by role, that take new work
    desired: dict[str, int]  # by role, that would be enough: for whoever starts and stops workers
    pressures: dict[str, float]  # by role: load as a share of capacity
    reason: str  # of the last decision
    moves: int = 0  # since it started


ToWorker = Reserve | Handoff | WriterDone | LeaseAborted | Cancel | Resend | Received | SetRoles | Drain
ToGateway = Claim | Settle | Failed | Imported | Trying
WorkerReply = ReserveReply | HandoffReply | RolesReply | Ack
GatewayReply = ClaimReply | SettleReply | Ack

to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
to_gateway_decoder: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
worker_reply_decoder: msgspec.msgpack.Decoder[WorkerReply] = msgspec.msgpack.Decoder(WorkerReply)
gateway_reply_decoder: msgspec.msgpack.Decoder[GatewayReply] = msgspec.msgpack.Decoder(GatewayReply)
frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
job_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
worker_state_decoder: msgspec.msgpack.Decoder[WorkerState] = msgspec.msgpack.Decoder(WorkerState)
planner_state_decoder: msgspec.msgpack.Decoder[PlannerState] = msgspec.msgpack.Decoder(PlannerState)
gateway_state_decoder: msgspec.msgpack.Decoder[GatewayState] = msgspec.msgpack.Decoder(GatewayState)

ANYBODY_THERE = Resend(request_id="", attempt=0, position=0)  # about no request: whoever answers is there
_encoder = msgspec.msgpack.Encoder()
Message = TypeVar("Message")


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as msgpack."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[Message], raw: bytes) -> Message:
    """Decode and check the version. Raises MalformedMessageError with the path of what is wrong, or ForeignVersionError."""
    try:
        message = decoder.decode(raw)
    except _UNREADABLE as error:
        with contextlib.suppress(*_UNREADABLE):
            _check(_version_decoder.decode(raw).v)  # of another release it needn't be readable
        raise MalformedMessageError(str(error)) from error
    _check(getattr(message, "v", PROTOCOL_VERSION))
    return message


class _Version(msgspec.Struct):
    v: int = PROTOCOL_VERSION


_version_decoder = msgspec.msgpack.Decoder(_Version)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the latter two: bad text, deep nesting


def _check(version: int) -> None:
    if not MIN_PROTOCOL_VERSION <= version <= MAX_PROTOCOL_VERSION:
        ours = f"this process works beside {MIN_PROTOCOL_VERSION} to {MAX_PROTOCOL_VERSION}"
        raise ForeignVersionError(f"protocol version {version}: {ours}; upgrade one release at a time")
