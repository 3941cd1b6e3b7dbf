"""Jobs: the work of one attempt, the features that it needs, the claim that starts it, and the settlement that ends it."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from common.messages.base import PROTOCOL_VERSION, WorkerMessage

MAX_GRAMMAR_CHARS = 64 << 10
# llguidance's limits for one grammar; gateway and workers must agree, or one would accept what the other refuses.
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 400_000,  # 50,000 take 1 ms
    "step_lexer_fuel": 100_000,  # 14,000 cost a mask 1 ms
    "max_items_in_row": 2_000,  # masks of 4,000 take 30 ms, growing quadratically
    "step_max_items": 50_000,  # 20,000 cost a mask 1 ms
    "max_lexer_states": 20_000,  # 2 KiB each
    "max_grammar_size": 200_000,
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters. Sampling is a pure function of (logits, seed, position, tokens so far)."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int = 0  # u64, always set by the gateway, so a resumed request continues identically
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None = off; k = also the k most likely tokens
    max_tokens: int  # generated tokens of the whole request, not of this attempt
    min_tokens: int = 0  # stop tokens are banned before this many were generated
    stop_token_ids: list[int] = []  # the model's EOS (unless ignore_eos) and the client's; output includes it
    prompt_logprobs: int | None = None  # None = off; k = also the k most likely
    typical_p: float = 1.0


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar for the generated tokens. The tokens alone determine the parser's state, so any worker can resume it."""

    text: str = ""  # as llguidance reads it; "": anything
    after: list[int] | None = None  # starts after these tokens, the end of thinking; None: at once
    budget: int | None = None  # thinking tokens before `after` is forced; None: unlimited
    allowed: list[int] = []  # the only tokens allowed, wherever the text is; []: all
    banned: list[list[int]] = []  # token runs that must not occur


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """Work: tokens after a prompt."""

    sampling: SamplingParams
    grammar: Grammar | None = None


# All kinds of work that some worker does. Another is a member, a `Feature` that it needs, and a field of `Job`.
Work = Generate


class Feature(StrEnum):
    """A capability that a worker may lack: one of release 0.1.0 has none of these, and would ignore what needs it.

    A new one is a member here, and a line in `NEEDED` if jobs ask for it. Heartbeats then say it, and gateways and prefill
    workers keep those jobs from workers that don't: placement compares words and knows none of them.
    """

    NAMED = "named"  # speaks and listens on subjects with its name
    GRAMMARS = "grammars"  # follows `Job.grammar`
    TYPICAL_P = "typical_p"  # follows `SamplingParams.typical_p`
    RESERVE_AGAIN = "reserve_again"  # answers `ReserveAgain`: it keeps jobs that wait for room
    PULLS = "pulls"  # answers `PullBlocks`


NEEDED: dict[str, Callable[[Work], bool]] = {
    Feature.GRAMMARS: lambda work: work.grammar is not None,
    Feature.TYPICAL_P: lambda work: work.sampling.typical_p < 1.0,
}


def features_of(work: Work) -> frozenset[str]:
    """The features of the workers that may do this."""
    return frozenset(feature for feature, is_needed in NEEDED.items() if is_needed(work))


class Goal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The times that make an answer good, as far as they are given (SLO). Being late is no error: nothing ends by a goal."""

    ttft_ms: float | None = None  # the request's receipt to its first token
    ttft_ms_per_token: float | None = None  # added for each prompt token, to `ttft_ms` alone
    tpot_ms: float | None = None  # mean time of a token after the first

    def or_else(self, other: Goal) -> Goal:
        """This one, with the other's times where it gives none."""
        given = {name: mine for name in self.__struct_fields__ if (mine := getattr(self, name)) is not None}
        return msgspec.structs.replace(other, **given)

    def ttft_s(self, prompt_tokens: int) -> float:
        """Seconds from the receipt to the first token of such a prompt; infinite without a goal."""
        if self.ttft_ms is None:
            return math.inf
        return (self.ttft_ms + (self.ttft_ms_per_token or 0.0) * prompt_tokens) / 1000

    @property
    def tpot_s(self) -> float:
        """Seconds of a token after the first; infinite without a goal."""
        return math.inf if self.tpot_ms is None else self.tpot_ms / 1000


NO_GOAL = Goal()


class Keep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A wish for the cached KV of a request. It costs nobody else more than the pool's bounds allow, and is no promise."""

    ttl_s: float = 0.0  # since its last use
    call_ttl_s: float = 0.0  # the same, once its answer ended by a tool call
    session: str = ""  # newer states supersede older ones
    tenant: str = ""  # named if it has a share
    share: float = 1.0  # part of a pool that the tenant's cached blocks may fill


NO_KEEP = Keep()


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Gateway -> prefill worker, through JetStream. Starts after a granted `Claim`; answered by token frames or `Failed`.

    In a resumed request (attempt > 1) the tokens that the client already has follow its prompt:
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
    decode_workers: list[str]  # candidates, best first; empty = decode where the prompt is computed
    deadline_ms: int  # remaining when published; `ClaimReply` brings it up to date
    priority: int = 0
    traceparent: str = ""
    suspect_until: int = 0  # > 0: a suspect, alone and `Trying` for so many tokens
    grammar: Grammar | None = None
    speculation: int = -1  # most drafted tokens of a pass; -1: as the worker is set
    prediction: bytes = b""  # packed tokens that the client expects in the answer
    goal: Goal = NO_GOAL  # counted from the receipt of the request: `ClaimReply.age_ms`
    keep: Keep = NO_KEEP
    holder: str = ""  # a worker with more of the prompt, to pull from
    holder_blocks: int = 0  # the blocks that it has of it

    @property
    def work(self) -> Work:
        """The work on the prompt. On the wire a job that names no other work generates, by the fields above."""
        return Generate(sampling=self.sampling, grammar=self.grammar)

    @property
    def context(self) -> str | UnsetType:
        """The `traceparent` of messages about this attempt."""
        return self.traceparent or UNSET


class Claim(WorkerMessage, frozen=True, kw_only=True, tag="claim"):
    """Worker -> gateway, request: may this worker start this attempt? Answered by `ClaimReply`. Idempotent."""

    is_held: bool = False  # already granted: the worker asks if the request is still wanted


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True, tag="claim_reply"):
    """Not granted: `term` the job. Another worker owns the request, or it is no longer wanted. -1: no deadline of its own."""

    granted: bool
    reason: str = ""
    remaining_ms: int = 0
    first_token_ms: int = -1  # likewise, of the first token
    age_ms: int = 0  # since the request's receipt


class Settle(WorkerMessage, frozen=True, kw_only=True, tag="settle"):
    """Prefill worker -> gateway, request: the decode worker accepted the manifest, or the request ended here."""

    decode_worker: str = ""  # the new owner; empty = ended on the sender
    decode_incarnation: int = 0
    push_ms: float = 0.0  # all pushes together
    late_push_ms: float = 0.0  # the part that prefill did not overlap
    handover_ms: float = 0.0  # first token sampled -> accepted by the decode worker


class SettleReply(msgspec.Struct, frozen=True, kw_only=True, tag="settle_reply"):
    """`ack`: ack the job in JetStream. Otherwise the attempt is stale: `term` the delivery, never ack it."""

    ack: bool


class Failed(WorkerMessage, frozen=True, kw_only=True, tag="failed"):
    """Worker -> gateway, one way: this attempt failed here. The gateway decides about another."""

    code: str  # `ServingError.code`
    message: str
    retryable: bool
    dead_worker: str = ""  # the decode worker whose silence ended the attempt, if any


class Trying(WorkerMessage, frozen=True, kw_only=True, tag="trying"):
    """Worker -> gateway, request (`Ack`): the next pass computes this suspect (`Job.suspect_until`) alone."""

    position: int = -1  # generated tokens before it; -1: of an older release
