"""Timings of an answer, for the dialects that report them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.answers.answer import Answer, Usage
from gateway.answers.choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Times of an answer so far, in milliseconds; 0: unknown yet. Several choices count as one answer."""

    usage: Usage
    prompt_ms: float  # the longest prefill, as measured by a worker
    predicted_ms: float  # from the first token to the last
    further: int  # tokens after the first of each choice, generated in that time
    ttft_ms: float  # receipt to first token
    total_ms: float  # receipt until now

    @classmethod
    def of(cls, answer: Answer, only: Choice | None = None) -> Timings:
        """Compute the timings; `only`: one of its choices."""
        usage, now = answer.usage() if only is None else _usage(answer, only), time.monotonic()
        lines = [choice.generation.timeline for choice in (answer.choices if only is None else [only])]
        firsts = [line.first_token_at for line in lines if line.first_token_at is not None]
        last = max((line.ended_at or now for line in lines if line.first_token_at is not None), default=now)
        received_at = min((line.received_at for line in lines), default=now)
        return cls(
            usage=usage,
            prompt_ms=max((line.phases.get("prefill", 0.0) for line in lines), default=0.0),
            predicted_ms=1000 * max(0.0, last - min(firsts, default=now)),
            further=max(0, usage.completion_tokens - len(firsts)),
            ttft_ms=max((line.ttft_ms or 0.0 for line in lines), default=0.0),
            total_ms=1000 * max(0.0, now - received_at),
        )

    @property
    def fresh(self) -> int:
        """Prompt tokens that were not cached."""
        return self.usage.prompt_tokens - self.usage.cached_tokens

    @property
    def before_prompt_ms(self) -> float:
        """Time before a worker started the prompt."""
        return max(0.0, self.ttft_ms - self.prompt_ms)


def _usage(answer: Answer, choice: Choice) -> Usage:
    return Usage(
        prompt_tokens=len(answer.prompts[choice.index // answer.choices_per_prompt]),
        completion_tokens=choice.completion_tokens,
        cached_tokens=choice.cached_tokens,
        reasoning_tokens=choice.reasoning_tokens,
        drafted=choice.generation.timeline.frames.drafted,
        accepted=choice.generation.timeline.frames.accepted,
    )


def timings_object(answer: Answer, only: Choice | None = None) -> dict[str, Any]:
    """llama.cpp's `timings`, of `only` one choice or of all. The predicted rate excludes each choice's first token."""
    found = Timings.of(answer, only)
    drafts = {"draft_n": found.usage.drafted, "draft_n_accepted": found.usage.accepted} if found.usage.drafted else {}
    return drafts | {
        "cache_n": found.usage.cached_tokens,
        **_pace("prompt", found.fresh, found.prompt_ms, found.fresh),
        **_pace("predicted", found.usage.completion_tokens, found.predicted_ms, found.further),
        "ttft_ms": round(found.ttft_ms, 3),
    }


def _pace(name: str, count: int, milliseconds: float, by: int) -> Mapping[str, Any]:
    each = milliseconds / by if by else 0.0
    return {
        f"{name}_n": count,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(each, 4),
        f"{name}_per_second": round(1000 / each, 3) if each else 0.0,
    }
