"""Whether a request may come in: bounds of what waits, and whether its first token can come in time. No I/O, no clock.

A request that can't be served in time is refused at once, with the time after which trying again makes sense, not after waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import OverloadedError
from common.messages import WorkerState

LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of what one gateway takes on."""

    max_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    cut_over_tokens: int = -1  # see `PlacementRequest`


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What is in front of a new request."""

    requests: int  # of this gateway, in flight
    waiting_tokens: int  # prompt tokens of this gateway's requests without a first token
    unclaimed_tokens: int  # those that no worker has taken yet
    claimed_tokens: int  # prompt tokens that workers took and have not computed, whoever sent them
    tokens_per_s: float  # at which the workers compute prompts; 0 = not measured

    @property
    def wait_s(self) -> float:
        """Until everything that waits is computed; 0 while nothing was measured."""
        return (self.claimed_tokens + self.unclaimed_tokens) / self.tokens_per_s if self.tokens_per_s else 0.0


def fleet_rate(prefill: Iterable[WorkerState], decode: Iterable[WorkerState]) -> float:
    """Prompt tokens a second of all workers together; those that have measured nothing count as the slowest that has.

    Decode workers count when nobody else prefills: what they compute beside their batches.
    """
    rates = [state.prefill_tokens_per_s for state in prefill]
    rates = rates or [state.local_tokens_per_s or state.prefill_tokens_per_s for state in decode]
    slowest = min((rate for rate in rates if rate > 0), default=0.0)
    return sum(rate or slowest for rate in rates)


def refusal(backlog: Backlog, limits: RequestLimits, *, num_tokens: int, deadline_s: float) -> OverloadedError | None:
    """Why a request of `num_tokens` prompt tokens, with `deadline_s` left, has to come back later; None when it may come in."""
    if backlog.requests >= limits.max_requests:
        return _later(f"{backlog.requests} requests are in flight, the limit", backlog.wait_s / 2)
    excess = backlog.waiting_tokens + num_tokens - limits.max_queued_tokens
    if backlog.waiting_tokens and excess > 0:
        wait_s = excess / backlog.tokens_per_s if backlog.tokens_per_s else 1.0
        return _later(f"{backlog.waiting_tokens} prompt tokens wait, the limit is {limits.max_queued_tokens}", wait_s)
    if backlog.wait_s > deadline_s:
        return _later(
            f"what waits takes {backlog.wait_s:.1f} s, the request's deadline is in {deadline_s:.1f} s",
            backlog.wait_s - deadline_s,
        )
    return None


def _later(reason: str, retry_after_s: float) -> OverloadedError:
    return OverloadedError(f"{reason}; try again later", retry_after_s=min(LONGEST_RETRY_S, max(1.0, retry_after_s)))
