"""A request in flight: its state, its mailbox, and its timings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from common.blocks import pack_tokens
from common.errors import DeadlineExceededError, ServingError
from common.messages import Grammar, Imported, Job, Settle, Tokens
from gateway.request.placement import Placement
from gateway.request.spec import GenerationSpec, Mailbox
from gateway.request.state import RequestState
from gateway.request.timeline import Timeline

QUEUED_WITHIN_S = 60.0  # Redis and NATS have answered or timed out long before


@dataclass(slots=True, kw_only=True)
class Place:
    """A request's batch slot."""

    waits: bool = False  # the prefill worker reports that every decode worker is full
    since: float | None = None  # first token of its decode worker
    preemptions: int = 0
    returns_at: float | None = None  # placed again, not decoding yet
    return_s: float = 0.0  # duration of its last return
    helped_at: float = 0.0  # last preemption for its benefit

    def decodes(self, now: float) -> None:
        """True if its decode worker sent tokens."""
        self.waits = False
        if self.since is None:
            self.since = now
            if self.returns_at is not None:
                self.return_s, self.returns_at = now - self.returns_at, None

    def lost(self) -> None:
        """Reset for another attempt."""
        self.waits, self.since = False, None


class ActiveRequest:
    """A `Generation` in flight."""

    def __init__(
        self,
        state: RequestState,
        started_at: float,
        on_cancel: Callable[[ActiveRequest, str], None],
        *,
        waited_s: float = 0.0,
        timeline: Timeline | None = None,  # started while it waited; None: it starts now
        on_call: Callable[[ActiveRequest], None] = lambda request: None,
        on_end_reasoning: Callable[[ActiveRequest, Grammar], bool] = lambda request, grammar: False,
    ) -> None:
        self._on_cancel = on_cancel
        self._on_call = on_call
        self._on_end_reasoning = on_end_reasoning
        self.state = state
        self.started_at = started_at
        self.waited_s = waited_s
        self.queued_at: float | None = None  # the first attempt's job
        self.claimed_at: float | None = None
        self.job: Job | None = None  # as last queued
        self.stream_seq = 0  # the last job's sequence in the queue
        self.prefilled = 0  # the newest attempt with tokens
        self.retrying = False
        self.lost_attempt = 0  # the newest attempt that failed while being queued
        self.probing = False
        self.place = Place()
        self.known_at = 0.0  # when a worker last confirmed that it has the request
        self.timings: dict[str, float] = {}
        spec = state.spec
        self.work = len(spec.token_ids)  # prompt tokens to compute, without known cached ones
        self.first_token_by = started_at + (spec.aim.first_token_s or spec.deadline_s)
        self.timeline = timeline or timeline_of(spec, started_at)
        self.timeline.waited_ms, self.timeline.phases = 1000 * waited_s, self.timings
        self.mailbox = Mailbox()

    @property
    def token_ids(self) -> list[int]:
        return self.state.token_ids

    @property
    def may_give_way(self) -> bool:
        """True if it decodes, or waits for a slot."""
        return not self.retrying and (self.place.waits or self.place.since is not None) and not self.state.is_over

    @property
    def context(self) -> str | UnsetType:
        """The `traceparent` of the current attempt's messages, or the request's own before its job."""
        if self.job is not None and self.job.attempt == self.state.attempt:
            return self.job.context
        return self.state.spec.origin.traceparent or UNSET

    def explain_first_token(self, tokens: Tokens, now: float) -> None:
        """Split the TTFT into the worker's queue and prefill, and the transit times."""
        claimed_at = self.claimed_at or now
        since_claim_ms = (now - claimed_at) * 1000
        queued_ms = (claimed_at - (self.queued_at or claimed_at) + self.waited_s) * 1000
        self.timings["queue"] = queued_ms + tokens.queue_ms
        self.timings["prefill"] = tokens.prefill_ms
        self.timings["first_frame"] = max(0.0, since_claim_ms - tokens.queue_ms - tokens.prefill_ms)

    def settled(self, message: Settle) -> None:
        """The prefill worker's report of its handoff."""
        self.timeline.settled(message)
        if message.push_ms:
            self.timings |= {
                "handover": message.handover_ms,
                "push": message.push_ms,
                "late_push": message.late_push_ms,
            }

    def imported(self, message: Imported, now: float) -> None:
        """The decode worker's report of the handoff."""
        self.timings["transfer"] = message.transfer_ms
        self.timeline.imported(message, now)

    def finish(self, error: ServingError | None) -> None:
        """Close the mailbox: no more tokens come."""
        self.mailbox.close(error)

    def cancel(self, reason: str) -> None:
        self._on_cancel(self, reason)

    def called(self) -> None:
        self._on_call(self)

    def end_reasoning(self, grammar: Grammar) -> bool:
        return self._on_end_reasoning(self, grammar)


def timeline_of(spec: GenerationSpec, submitted_at: float) -> Timeline:
    """The timeline of a request that is about to be admitted."""
    return Timeline(
        request_id=spec.request_id,
        received_at=spec.origin.received_at or submitted_at,
        submitted_at=submitted_at,
        prompt_tokens=len(spec.token_ids),
        traceparent=spec.origin.traceparent,
        asker=spec.origin.tenant,
        model=spec.model,
        patient=spec.priority < 0,
        goal=spec.goal,
    )


def job_of(
    state: RequestState, *, gateway: str, root: bytes, placement: Placement, traceparent: str, now: float
) -> Job:
    """The current attempt's job. Its prompt includes the tokens that the client has already."""
    spec = state.spec
    return Job(
        request_id=spec.request_id,
        attempt=state.attempt,
        gateway=gateway,
        token_ids=pack_tokens(state.token_ids),
        num_prompt_tokens=len(spec.token_ids),
        hash_root=root,
        sampling=state.sampling,
        decode_workers=placement.decode,
        deadline_ms=max(1, int((state.deadline_at - now) * 1000)),
        priority=spec.priority,
        traceparent=traceparent,
        suspect_until=state.clear_at if state.is_suspect else 0,
        grammar=spec.grammar,
        speculation=spec.drafts.most,
        prediction=spec.drafts.prediction,
        goal=spec.goal,
        keep=spec.sharing.keep,
        holder="" if state.is_suspect else placement.holder,
        holder_blocks=placement.holder_blocks,
    )


@contextlib.asynccontextmanager
async def within_deadline(state: RequestState, now: float) -> AsyncIterator[None]:
    """Context manager: raise DeadlineExceededError at the request's deadline."""
    if state.deadline_at - now > QUEUED_WITHIN_S:
        yield
        return
    try:
        async with asyncio.timeout(state.deadline_at - now):
            yield
    except TimeoutError as error:
        raise DeadlineExceededError("the request's deadline passed before it was queued") from error
