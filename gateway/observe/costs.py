"""The cost of requests in device seconds, estimated from measured rates. No I/O, no clock.

A prompt costs its computed tokens at its worker's rate, a generated token its part of a decode step. Together requests cost about
the time that devices were busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.messages import WorkerState
from gateway.request.timeline import AttemptLine, Timeline


@dataclass(frozen=True, slots=True)
class DeviceSeconds:
    """The summed cost of a request's attempts."""

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates by worker. Without a measurement, a worker counts as the mean of the others."""

    token_s: Mapping[str, float] = field(default_factory=dict)  # seconds per prompt token
    step_s: Mapping[str, float] = field(default_factory=dict)  # seconds per generated token

    @classmethod
    def of(cls, workers: Iterable[WorkerState]) -> Rates:
        states = list(workers)
        token_s = {one.worker: 1 / one.prefill_tokens_per_s for one in states if one.prefill_tokens_per_s > 0}
        step_s = {
            one.worker: one.decode_step_ms / 1000 / max(1, one.running) for one in states if one.decode_step_ms > 0
        }
        return cls(token_s, step_s)


def device_seconds(line: Timeline, rates: Rates) -> DeviceSeconds:
    """The cost of an ended request.

    An attempt without a first token is free: nobody knows how much was computed.
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
    return max(0, attempt.num_tokens - 1)  # prefill samples the first one


def _rate(rates: Mapping[str, float], worker: str) -> float:
    if worker in rates or not rates:
        return rates.get(worker, 0.0)
    return sum(rates.values()) / len(rates)
