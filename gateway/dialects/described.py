"""A request as attributes of its span, by GenAI's semantic conventions."""

from __future__ import annotations

from common.tracing import Attributes


def described(
    *,
    model: str,
    stream: bool,
    choices: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Attributes:
    """Return the attributes; those absent from the body are left out."""
    said = {
        "gen_ai.request.choice.count": choices,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": temperature,
        "gen_ai.request.top_p": top_p,
        "gen_ai.request.seed": seed,
    }
    return {
        "gen_ai.request.model": model,
        "gen_ai.request.stream": stream,
        **{name: value for name, value in said.items() if value is not None},
    }
