"""The recurrence over states in plain torch: one token of each sequence, or the tiles of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from engine.kernels.delta.plan import CARRIED, StateBatch

# Takes a state and a token's parts, or those of several tokens; returns the output, and the state after them.
Advance = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def walk(
    parts: Sequence[torch.Tensor],
    kept: torch.Tensor,
    out: torch.Tensor,
    batch: StateBatch,
    *,
    step: Advance,
    tile: Advance,
) -> None:
    """Write each token's output to `out` [T, ...], and update the states `kept` [num_blocks, ...].

    Each of `parts` [T, ...] has something of each token. `step` takes one token, `tile` several of one sequence.
    """
    for row, source, target in chain(*batch.steps()):
        out[row], kept[target] = step(_before(kept, source), *(part[row] for part in parts))
    for first, count in batch.runs.tolist():
        state = None
        for begin, length, source, target, *_ in batch.tiles[first : first + count].tolist():
            rows = slice(begin, begin + length)
            if source != CARRIED:
                state = _before(kept, source)
            out[rows], state = tile(state, *(part[rows] for part in parts))
            if target >= 0:
                kept[target] = state


def _before(kept: torch.Tensor, block: int) -> torch.Tensor:
    return kept.new_zeros(kept.shape[1:]) if block < 0 else kept[block]
