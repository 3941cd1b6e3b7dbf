"""The results of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.messages import PromptLogprobs, TokenLogprobs


class Sampled(msgspec.Struct, frozen=True):
    """One sampled token; `logprobs` when the request asked for them.

    `prompt_logprobs`: of the tokens after the chunk's first `Chunk.scored` positions, also without a sampled token (-1).
    With a `problem`, no attempt can sample one. `further`: the tokens behind accepted drafts, in order, as many as these.
    `drafts`: tokens that a draft head expects behind the last of these, which has them.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    problem: str = ""
    further: tuple[Sampled | None, ...] = ()  # None ends them: unusable logits
    drafts: tuple[int, ...] = ()


class InvalidChunkError(ValueError):
    """A chunk that the engine can't compute. Nothing was computed; the pool is unchanged."""


class Pass(Protocol):
    """A launched pass, possibly still running on the device."""

    def wait(self) -> list[Sampled | None]:
        """Block until the pass is complete; return one result for each chunk, in order. Any thread may call it again.

        None for a chunk that neither samples nor scores, or without usable logits (NaN or infinity): fail that request alone.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A pass that was complete when `launch` returned."""

    results: list[Sampled | None]

    def wait(self) -> list[Sampled | None]:
        return self.results
