"""The capacity of a fleet: prefill rates, queues and batch slots of its workers. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from common.messages import WorkerState
from gateway.admission.places import Places

SHORT_PROMPT_S = 0.5  # an idle decode worker may start prompts this short outside the window
UNMEASURED_LOCAL_SHARE = 0.25  # assumed prefill rate of a decode worker, relative to the prefill rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefiller:
    """A worker that computes prompts."""

    tokens_per_s: float = 0.0  # 0 = not measured
    queued_tokens: int = 0  # tokens ahead of a new prompt
    fixed_s: float = 0.0  # overhead of each pass
    decodes: bool = False  # it also decodes


@dataclass(kw_only=True)
class Capacity:
    """The fleet as a gateway sees it. Nothing is predicted until a worker has measured its rate.

    `unplaced_tokens` and `passed` may grow as requests start, until the fleet is looked at again.
    """

    workers: tuple[Prefiller, ...]
    gateways: int = 1  # alive, this one included
    unplaced_tokens: int = 0  # started anywhere, in no worker's `queued_tokens` yet
    started_elsewhere: int = 0  # prompt tokens in the windows of other gateways
    waiting_elsewhere: int = 0  # prompt tokens that wait at other gateways
    passed: int = 0  # short prompts started outside the window
    places: Places = field(default_factory=Places)

    @cached_property
    def tokens_per_s(self) -> float:
        return sum(worker.tokens_per_s for worker in self.workers)

    @cached_property
    def _free(self) -> list[tuple[float, float]]:
        """(seconds until a worker is free, its rate), earliest first."""
        return sorted((w.queued_tokens / w.tokens_per_s, w.tokens_per_s) for w in self.workers)

    def wait_s(self, ahead: float) -> float:
        """Seconds until `ahead` more prompt tokens are dispatched, each to a free worker, and a worker is free."""
        if not self.tokens_per_s:
            return 0.0
        rate, level, left = 0.0, 0.0, ahead
        for free_at, worker_rate in self._free:
            if rate and left < (free_at - level) * rate:
                break
            left -= (free_at - level) * rate
            rate, level = rate + worker_rate, free_at
        return level + left / rate

    def first_token_s(self, ahead: float, work: int) -> float:
        """Predicted TTFT of a prompt of `work` tokens behind `ahead` tokens; 0 while unmeasured."""
        if not self.tokens_per_s:
            return 0.0
        level = self.wait_s(ahead)
        return min(
            max(level, worker.queued_tokens / worker.tokens_per_s) + worker.fixed_s + work / worker.tokens_per_s
            for worker in self.workers
        )

    def computing_s(self, work: int) -> float:
        """Seconds of prefill on the fastest worker, without waiting."""
        return min((one.fixed_s + work / one.tokens_per_s for one in self.workers if one.tokens_per_s), default=0.0)

    def fastest_s(self, work: int) -> float:
        """A cheap upper bound of `first_token_s`: the fastest worker takes the prompt next."""
        offset_s, rate = self._fastest
        return offset_s + work / rate if rate else 0.0

    @cached_property
    def _fastest(self) -> tuple[float, float]:
        if not self.tokens_per_s:
            return 0.0, 0.0
        worker = max(self.workers, key=lambda one: one.tokens_per_s)
        return worker.queued_tokens / worker.tokens_per_s + worker.fixed_s, worker.tokens_per_s

    @cached_property
    def _beside(self) -> list[Prefiller]:
        """Decode workers without queued prompts, the fastest first."""
        idle = (
            worker for worker in self.workers if worker.decodes and not worker.queued_tokens and worker.tokens_per_s
        )
        return sorted(idle, key=lambda worker: -worker.tokens_per_s)

    @property
    def short(self) -> float:
        """The longest prompt that an idle decode worker computes within `SHORT_PROMPT_S`; 0 if none is idle."""
        return SHORT_PROMPT_S * self._beside[self.passed].tokens_per_s if self.passed < len(self._beside) else 0.0

    def window(self, seconds: float) -> float:
        """This gateway's window in prompt tokens: an equal share, or more if other gateways use less."""
        if not self.tokens_per_s:
            return math.inf
        size = self.tokens_per_s * seconds
        return max(size / self.gateways, size - self.started_elsewhere)


def prefillers(
    prefill: Iterable[WorkerState], decode: Iterable[WorkerState], *, local: bool, queued: Mapping[str, int]
) -> tuple[Prefiller, ...]:
    """The workers that compute prompts. One without a measured rate counts as the slowest of the others.

    `local`: decode workers compute prompts, too, as they do when nobody else prefills. `queued`: worker -> prompt tokens
    waiting there.
    """
    rates = {state.worker: (state.prefill_tokens_per_s, state) for state in prefill}
    beside, alone = set[str](), not rates
    if local or alone:
        for state in decode:
            share = 1.0 if alone else UNMEASURED_LOCAL_SHARE
            rate = state.local_tokens_per_s or share * state.prefill_tokens_per_s
            if (alone or rate) and state.worker not in rates:
                rates[state.worker] = rate, state
                beside.add(state.worker)
    slowest = min((rate for rate, _ in rates.values() if rate > 0), default=0.0)
    return tuple(
        Prefiller(
            tokens_per_s=rate or slowest,
            queued_tokens=queued.get(state.worker, 0),
            fixed_s=state.prefill_fixed_ms / 1000,
            decodes=state.worker in beside,
        )
        for rate, state in rates.values()
    )
