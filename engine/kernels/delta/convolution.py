"""A causal convolution of each channel alone, whose last inputs a block keeps. T tokens, C channels, K taps."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.kernels.delta.plan import Channels, StateBatch
from engine.kernels.twin import twin


@twin("engine.kernels.delta.triton_convolution")
def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    batch: StateBatch,
    channels: Channels,
) -> torch.Tensor:
    """Return sum_i weight[:, i] * input of K - 1 - i tokens before, plus `bias` [C], or silu of that [T, C].

    `x` [T, N] is the layer's product, `weight` [C, K], `kept` [num_blocks, K - 1, 1, 1, C] a strided view of the pool, the oldest
    input first.
    """
    inputs = channels.of(x)
    out = torch.empty_like(inputs)

    def window(new: torch.Tensor, source: int, ends: list[tuple[int, int]]) -> torch.Tensor:
        total = _window(new, weight, last, source, ends)
        total = (total if bias is None else total + bias.float()).to(new.dtype)
        return silu(total) if channels.has_silu else total

    last = kept[:, :, 0, 0]  # [num_blocks, K - 1, C]
    for row, (source, target) in enumerate(batch.moves.tolist()):
        if target >= 0:
            out[row] = window(inputs[row : row + 1], source, [(1, target)])[0]
    for first, count in batch.runs.tolist():
        if not count:
            continue
        tiles = batch.tiles[first : first + count].tolist()
        begin, end = tiles[0][0], tiles[-1][0] + tiles[-1][1]
        ends = [(tile[0] + tile[1] - begin, tile[3]) for tile in tiles if tile[3] >= 0]
        out[begin:end] = window(inputs[begin:end], tiles[0][2], ends)
    return out


def _window(
    inputs: torch.Tensor, weight: torch.Tensor, last: torch.Tensor, source: int, ends: list[tuple[int, int]]
) -> torch.Tensor:
    """The sums [n, C] in float32 over one sequence's new inputs [n, C]; keeps the inputs before each end in its block."""
    before = last.new_zeros(last.shape[1:]) if source < 0 else last[source]
    known = torch.cat((before, inputs))
    for end, block in ends:
        last[block] = known[end : end + len(before)]
    rows = known.float().unfold(0, weight.shape[1], 1)  # [n, C, K]
    return (rows * weight.float()).sum(dim=-1)
