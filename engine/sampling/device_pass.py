"""Results of a pass that may still be running on the GPU, in the order of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.passes import Sampled
from engine.sampling.device import Draw
from engine.sampling.host import in_order
from engine.sequence import Chunk


@dataclass(frozen=True, slots=True)
class DevicePass:
    """A pass that may still be running on the device."""

    chunks: list[Chunk]
    sampling: list[Chunk]  # rows of the draw
    draw: Draw | None
    over: torch.cuda.Event | None  # recorded after a pass that samples nothing
    problems: Mapping[Chunk, str]  # see `Sampled.problem`
    check: Callable[[], None]  # see `Group.check`

    @classmethod
    def of_none(cls, chunks: list[Chunk], device: torch.device, check: Callable[[], None]) -> DevicePass:
        """A pass that samples nothing."""
        over = torch.cuda.Event() if device.type == "cuda" else None
        if over is not None:
            over.record()
        return cls(chunks, [], None, over, {}, check)

    def wait(self) -> list[Sampled | None]:
        """Block until the results are there. Raises RankLostError: without all ranks they are wrong."""
        results: list[Sampled | None] = [None] * len(self.chunks)
        if self.draw is not None:
            results = in_order(self.chunks, self.sampling, self.draw.wait(), self.problems)
        elif self.over is not None:
            self.over.synchronize()
        self.check()
        return results
