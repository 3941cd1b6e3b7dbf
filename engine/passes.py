"""The results of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token; `logprobs` when the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class InvalidChunkError(ValueError):
    """A chunk that the engine can't compute. Nothing was computed; the pool is unchanged."""


class Pass(Protocol):
    """A launched pass; the device may still be busy with it."""

    def wait(self) -> list[Sampled | None]:
        """Block until the pass is over; return one result for each chunk, in order. Any thread may call it again.

        None for a chunk with `sample=False`, or without usable logits (NaN or infinity): fail that request alone.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A pass that was over when `launch` returned."""

    results: list[Sampled | None]

    def wait(self) -> list[Sampled | None]:
        return self.results
