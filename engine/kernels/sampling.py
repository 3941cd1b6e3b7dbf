"""The draw of a token by the Gumbel-max trick with counter-based noise. R rows, V vocabulary.

Filters and penalties are applied to the scores before (`engine.sampler`); the draw itself needs no sort and no host.
"""

from __future__ import annotations

import torch

from engine.kernels.backend import use_triton
from engine.philox import gumbel_noise


def gumbel_argmax(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return argmax_v(scores + Gumbel noise) [R] int64 for `scores` [R, V] float32, `seeds` and `positions` [R] int64.

    The noise of (seed, position, v) is Philox 4x32-10 with key `seed` and counter `position << 32 | v`, as `tl.rand` computes it.
    """
    if use_triton(scores):
        from engine.kernels.triton_sampling import gumbel_argmax as kernel

        return kernel(scores, seeds, positions)
    return reference(scores, seeds, positions)


def reference(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The twin of `gumbel_argmax`."""
    return (scores + gumbel_noise(seeds, positions, scores.shape[1])).argmax(dim=-1)
