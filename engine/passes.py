"""What comes out of a pass of the model, and when."""

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
    """A chunk that the engine can't compute. Nothing was computed, the pool is as it was."""


class Pass(Protocol):
    """A pass that was launched; the device may still be busy with it."""

    def wait(self) -> list[Sampled | None]:
        """Block until the pass is over; return one result for each chunk, in order. May be called again, by any thread.

        None for a chunk with `sample=False`. None for one with `sample=True` says that the model gave no usable logits
        (NaN or infinity) for this sequence: fail that request, the others are not affected.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A pass that was over when `launch` returned."""

    results: list[Sampled | None]

    def wait(self) -> list[Sampled | None]:
        return self.results
