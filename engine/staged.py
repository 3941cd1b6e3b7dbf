"""Passes whose first stage is computed here: results come later, from the last stage's logits, pass by pass.

    stage 0   pass n ─ pass n+1 ────────
    stage 1            pass n ─ pass n+1
    sampling                    n ─ n+1

The next pass is launched while other stages compute this one, unless it begins with a token that this one samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from engine.parallel.stage import Stage
from engine.passes import Pass, Sampled
from engine.sequence import Chunk


@dataclass(frozen=True, slots=True)
class StagedPass:
    """A pass that may still be in a later stage."""

    results: Future[list[Sampled | None]]

    def wait(self) -> list[Sampled | None]:
        return self.results.result()


class Staged:
    """The passes of a model's first stage. `launched` is called by one thread at a time."""

    def __init__(self, stage: Stage, vocab_size: int, dtype: torch.dtype) -> None:
        self._stage, self._vocab_size, self._dtype = stage, vocab_size, dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="last-stage")
        self._newest: StagedPass | None = None

    @classmethod
    def of(cls, stage: Stage, vocab_size: int, dtype: torch.dtype) -> Staged | None:
        """None for a single stage."""
        return cls(stage, vocab_size, dtype) if stage.count > 1 else None

    def know(self, chunks: Iterable[Chunk]) -> None:
        """Wait for the last pass if a chunk ends with a token that it samples. Raises what `Pass.wait` raises."""
        pending = any(chunk.end > len(chunk.sequence.token_ids) + len(chunk.drafted) for chunk in chunks)
        if pending and self._newest is not None:
            self._newest.wait()

    def launched(self, num_logits: int, finish: Callable[[torch.Tensor | None], Pass]) -> Pass:
        """Return a pass whose results `finish` makes of so many rows of logits, after those of the passes before."""
        self._newest = StagedPass(self._thread.submit(self._results, num_logits, finish))
        return self._newest

    @torch.inference_mode()
    def _results(self, num_logits: int, finish: Callable[[torch.Tensor | None], Pass]) -> list[Sampled | None]:
        shape = (num_logits, self._vocab_size if num_logits else 0)
        logits = self._stage.receive(shape, self._dtype)
        return finish(logits if num_logits else None).wait()
