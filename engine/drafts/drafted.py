"""The results of a pass that is drafted behind."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from engine.passes import Finished, Pass, Sampled
from engine.sampling.readback import Readback
from engine.sequence import Chunk


@dataclass(frozen=True, slots=True)
class ReadPass:
    """A pass on a GPU without drafts, over once the head has written its keys and values as well."""

    launched: Pass
    over: torch.cuda.Event

    @classmethod
    def behind(cls, launched: Pass, device: torch.device) -> Pass:
        """The pass, and what was launched after it; on a CPU both are over."""
        if device.type == "cpu":
            return launched
        over = torch.cuda.Event()
        over.record()
        return cls(launched, over)

    def wait(self) -> list[Sampled | None]:
        self.over.synchronize()
        return self.launched.wait()


@dataclass(frozen=True, slots=True)
class DraftedPass:
    """A pass whose results have drafts, on their way to the host."""

    launched: Pass
    chunks: list[Chunk]
    places: dict[Chunk, tuple[int, int]]  # row of `guessed`, and how many of it count
    guessed: Readback

    def wait(self) -> list[Sampled | None]:
        guessed = self.guessed.wait().tolist()
        results = self.launched.wait()
        for index, chunk in enumerate(self.chunks):
            row, count = self.places.get(chunk, (0, 0))
            result = results[index]
            if count and result is not None and not result.problem:
                results[index] = msgspec.structs.replace(result, drafts=tuple(guessed[row][:count]))
        return results

    def finished(self) -> Pass:
        """The same as a completed pass on a CPU."""
        return Finished(self.wait()) if self.guessed.is_immediate else self
