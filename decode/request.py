"""One request inside the decode role, and its spans: the verification of its handoff, and its time in the batch."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from common.blocks import pack_tokens
from common.messages import Handoff, Job, TokenLogprobs, Tokens
from common.tracing import Children, Tracer, Value
from common.words import Finish
from engine.passes import Sampled
from engine.sequence import Sequence
from worker.serving.jobs import ClaimedJob
from worker.serving.turns import Wait, Waits


def drafts_of(sampled: Sampled | None) -> tuple[int, ...]:
    """The tokens that a draft head expects behind a sampled one."""
    return () if sampled is None else sampled.drafts


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """A sequence that decodes here, kept until the gateway has its last token (for `Resend`)."""

    job: Job
    sequence: Sequence
    deadline_at: float  # `time.monotonic()`
    first_position: int  # the first generated token that can be resent from here
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # from `first_position` on, if requested
    cached_tokens: int = -1  # prompt tokens from the prefill worker's prefix cache
    began_at: float = field(default_factory=time.monotonic)  # when it was verified, or claimed for local prefill
    received_at: float = 0.0  # by the gateway, since when its goal counts; 0 = `began_at`
    waits: Waits = field(default_factory=Waits)  # from `began_at` until its first chunk
    started_at: float = 0.0  # its first chunk was planned here; 0 = not yet
    first_token_at: float = 0.0  # the first token sampled here; 0 = none yet
    finish: Finish = Finish.NONE
    ended_at: float | None = None
    stopped: str = ""
    preemptions: int = 0
    num_expected: int = 0  # leading tokens that its admission may find cached
    passed: int = 0  # requests admitted before it while it waited for blocks
    drafted: int = 0  # tokens that passes verified here
    accepted: int = 0
    num_before: int = field(init=False)  # generated tokens that were sampled elsewhere

    def __post_init__(self) -> None:
        self.num_before = self.sequence.num_generated
        self.received_at = self.received_at or self.began_at

    @classmethod
    def claimed(cls, claimed: ClaimedJob, sequence: Sequence) -> DecodeRequest:
        """The request of a job whose prompt is computed here."""
        return cls(
            job=claimed.job,
            sequence=sequence,
            deadline_at=claimed.deadline_at,
            first_position=sequence.num_generated,
            began_at=claimed.claimed_at,
            received_at=claimed.received_at,
            waits=Waits(Wait.PROMPTS if sequence.grammar is None else Wait.GRAMMAR),
        )

    @property
    def id(self) -> str:
        return self.job.request_id

    @property
    def attempt(self) -> int:
        return self.job.attempt

    @property
    def is_prompt(self) -> bool:
        """True while more than its next token is to be computed."""
        return self.sequence.num_unscheduled > 1

    @property
    def num_cached(self) -> int:
        """Leading tokens that were found cached, or, until its admission, are expected to be."""
        return self.sequence.num_cached if self.sequence.tables else self.num_expected

    @property
    def num_to_compute(self) -> int:
        """Tokens in no pass yet, without those expected to be cached."""
        return max(0, self.sequence.num_unscheduled - (0 if self.sequence.tables else self.num_expected))

    @property
    def is_over(self) -> bool:
        """True if it ended or was cancelled: later pass results are ignored."""
        return bool(self.stopped) or self.ended_at is not None

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.deadline_at

    def take(self, results: ListOf[Sampled | None], *, max_model_len: int) -> int:
        """Append a pass's tokens up to one that ends the answer, or to a result without a token; return their number."""
        sequence = self.sequence
        for count, sampled in enumerate(results):
            if sampled is None or sampled.problem:
                return count
            sequence.append(sampled.token_id)
            if sampled.logprobs is not None:
                self.logprobs.append(sampled.logprobs)
            self.first_token_at = self.first_token_at or time.monotonic()
            self.finish = sequence.finish_reason()
            if not self.finish and len(sequence.token_ids) >= max_model_len:
                self.finish = Finish.LENGTH
            if self.finish:
                return count + 1
        return len(results)

    def tokens_from(self, position: int) -> Tokens | None:
        """Tokens from generated `position` on that this worker sampled; None if there are none."""
        position = max(position, self.first_position)
        ids = self.sequence.token_ids[self.sequence.num_prompt_tokens + position :]
        if not ids:
            return None
        return Tokens(
            request_id=self.id,
            attempt=self.attempt,
            position=position,
            token_ids=pack_tokens(ids),
            finish=self.finish,
            logprobs=self.logprobs[position - self.first_position :],
            cached_tokens=self.cached_tokens if position == 0 else -1,
            traceparent=self.job.context if position <= self.num_before else UNSET,
            prompt_logprobs=self.sequence.prompt_logprobs if position == 0 else None,
            drafted=self.drafted,
            accepted=self.accepted,
        )

    def prefilled_here(self, tokens: Tokens, *, since: float) -> Tokens:
        """The first tokens of a local job, with its prefix hit and its times `since` its claim."""
        queue_ms = (self.started_at - since) * 1000
        return msgspec.structs.replace(
            tokens,
            cached_tokens=min(self.sequence.num_found or 0, self.job.num_prompt_tokens),
            queue_ms=queue_ms,
            waits=self.waits.ms,
            prefill_ms=(time.monotonic() - self.started_at) * 1000,
        )


def record_verification(tracer: Tracer, message: Handoff, *, worker: str, began_at: float, refusal: str) -> None:
    """Record a manifest's check; `refusal`: the reason for refusing it, or ""."""
    parent = message.traceparent or ""
    if not tracer.wants(parent):
        return
    attributes: dict[str, Value] = {
        "baton.request_id": message.request_id,
        "baton.attempt": message.attempt,
        "baton.worker": worker,
        "baton.transfer.blocks": len(message.digests) // 8,
    }
    children = Children(tracer, parent, attributes)
    children.record("verify", began_at, time.monotonic(), {}, outcome=refusal)


def record_decode(tracer: Tracer, request: DecodeRequest, *, worker: str) -> None:
    """Record a sequence that left the batch, ended or stopped. A local one was also prefilled here."""
    parent = request.job.traceparent
    if not tracer.wants(parent):
        return
    now, began_at = time.monotonic(), request.began_at
    children = Children(
        tracer,
        parent,
        {"baton.request_id": request.id, "baton.attempt": request.attempt, "baton.worker": worker},
    )
    if not request.job.decode_workers:
        prefill: dict[str, Value] = {
            "baton.prompt_tokens": request.job.num_prompt_tokens,
            "baton.cached_tokens": request.sequence.num_cached,
            "baton.local": True,
        }
        outcome = "" if request.first_token_at else request.stopped
        children.record("prefill", began_at, request.first_token_at or now, prefill, outcome=outcome)
        began_at = request.first_token_at
    if began_at:
        decode: dict[str, Value] = {
            "baton.tokens": request.sequence.num_generated - request.num_before,
            "baton.preemptions": request.preemptions,
            **_drafts(request),
            "baton.finish": request.finish or request.stopped,
            "baton.decode.first_step_ms": 1000 * max(0.0, (request.first_token_at or now) - request.began_at),
        }
        children.record("decode", began_at, request.ended_at or now, decode, outcome=request.stopped)


def _drafts(request: DecodeRequest) -> dict[str, Value]:
    """Tokens of the drafts that passes verified here; nothing without drafts."""
    if not request.drafted:
        return {}
    return {"baton.drafted_tokens": request.drafted, "baton.accepted_tokens": request.accepted}
