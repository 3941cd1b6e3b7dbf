"""What requests cost their tenants: seconds of devices, from tokens and the rates that workers measure. No I/O, no clock.

A prompt costs its computed tokens by the rate at which its worker computes prompts. A generated token costs a step of its decode
worker, shared by those who are in the batch. So all requests together cost about as long as the devices were busy with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.messages import WorkerState
from gateway.timeline import AttemptLine, Timeline


@dataclass(frozen=True, slots=True)
class DeviceSeconds:
    """Of one request, all attempts together."""

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What workers measured, by their names. One that is gone, or has measured nothing, is taken for the mean of the others."""

    token_s: Mapping[str, float] = field(default_factory=dict)  # of a prompt
    step_s: Mapping[str, float] = field(default_factory=dict)  # a sequence's part of a step

    @classmethod
    def of(cls, workers: Iterable[WorkerState]) -> Rates:
        """As their heartbeats say."""
        states = list(workers)
        token_s = {one.worker: 1 / one.prefill_tokens_per_s for one in states if one.prefill_tokens_per_s > 0}
        step_s = {
            one.worker: one.decode_step_ms / 1000 / max(1, one.running) for one in states if one.decode_step_ms > 0
        }
        return cls(token_s, step_s)


def device_seconds(line: Timeline, rates: Rates) -> DeviceSeconds:
    """The cost of a request that ended.

    An attempt that was given up before its first token is free: nobody says how much of it was computed.
    """
    attempts = [attempt for attempt in line.attempts if attempt.first_token_at is not None]
    return DeviceSeconds(
        prefill=sum(_computed(attempt) * _rate(rates.token_s, attempt.claimed_by) for attempt in attempts),
        decode=sum(
            _stepped(attempt) * _rate(rates.step_s, attempt.decoder or attempt.claimed_by) for attempt in attempts
        ),
    )


def _computed(attempt: AttemptLine) -> int:
    cached = attempt.promised_tokens if attempt.cached_tokens is None else attempt.cached_tokens
    return max(1, attempt.prompt_tokens - cached)


def _stepped(attempt: AttemptLine) -> int:
    return max(0, attempt.num_tokens - 1)  # the first one is the prefill's


def _rate(rates: Mapping[str, float], worker: str) -> float:
    if worker in rates or not rates:
        return rates.get(worker, 0.0)
    return sum(rates.values()) / len(rates)
