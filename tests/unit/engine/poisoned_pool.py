"""A pool in which nothing stale can look right."""

from __future__ import annotations

import torch

from engine.cache.block_pool import BlockPool
from tests.unit.engine.by_hand import NAN


class PoisonedPool(BlockPool):
    """A pool whose blocks are filled with what was never written when somebody takes them."""

    lanes: torch.Tensor

    def allocate(self, count: int, *, spare: int = 0) -> list[int]:
        blocks = super().allocate(count, spare=spare)
        if blocks:
            self.lanes[blocks] = NAN
        return blocks
