"""A causal convolution of each channel alone, whose last inputs a block keeps. T tokens, C channels, K taps."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.kernels.delta.plan import DeltaHeads, StateBatch
from engine.kernels.twin import twin


@twin("engine.kernels.delta.triton_convolution")
def convolve(
    x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, batch: StateBatch, heads: DeltaHeads
) -> torch.Tensor:
    """Return silu(sum_i weight[:, i] * input of K - 1 - i tokens before) [T, C]: queries, keys, values side by side.

    `x` [T, N] is the layer's product, `weight` [C, K], `kept` [num_blocks, K - 1, 1, 1, C] a strided view of the pool, the oldest
    input first.
    """
    inputs = torch.cat(
        [
            heads.view(x, columns, width).flatten(1)
            for columns, width in (
                (heads.q, heads.key_dim),
                (heads.k, heads.key_dim),
                (heads.v, heads.ratio * heads.value_dim),
            )
        ],
        dim=1,
    )
    out = torch.empty_like(inputs)
    last = kept[:, :, 0, 0]  # [num_blocks, K - 1, C]
    for row, (source, target) in enumerate(batch.moves.tolist()):
        if target >= 0:
            out[row] = _window(inputs[row : row + 1], weight, last, source, [(1, target)])[0]
    for first, count in batch.runs.tolist():
        if not count:
            continue
        tiles = batch.tiles[first : first + count].tolist()
        begin, end = tiles[0][0], tiles[-1][0] + tiles[-1][1]
        ends = [(tile[0] + tile[1] - begin, tile[3]) for tile in tiles if tile[3] >= 0]
        out[begin:end] = _window(inputs[begin:end], weight, last, tiles[0][2], ends)
    return out


def _window(
    inputs: torch.Tensor, weight: torch.Tensor, last: torch.Tensor, source: int, ends: list[tuple[int, int]]
) -> torch.Tensor:
    """One sequence's new inputs [n, C]; keeps the inputs before each end in its block."""
    before = last.new_zeros(last.shape[1:]) if source < 0 else last[source]
    known = torch.cat((before, inputs))
    for end, block in ends:
        last[block] = known[end : end + len(before)]
    rows = known.float().unfold(0, weight.shape[1], 1)  # [n, C, K]
    return silu((rows * weight.float()).sum(dim=-1).to(inputs.dtype))
