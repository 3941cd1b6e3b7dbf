"""A causal depthwise convolution, whose last inputs are kept in a block. T tokens, C channels, K taps."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.kernels.delta.plan import Channels, StateBatch
from engine.kernels.device import twin


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
    input first. With `channels.gates` inputs and outputs are multiplied by other columns of x.
    """
    inputs = channels.of(x)
    sums = torch.empty(inputs.shape, dtype=torch.float32, device=x.device)
    taps, last = weight.float().T.contiguous(), kept[:, :, 0, 0]  # [K, C] and [num_blocks, K - 1, C]
    for steps in batch.steps():
        if len(steps) == 1:
            ((row, source, target),) = steps
            sums[row : row + 1] = _window(inputs[row : row + 1], taps, last, source, [(1, target)])
        else:
            _step(inputs, taps, last, steps, sums)
    for first, count in batch.runs.tolist():
        if not count:
            continue
        tiles = batch.tiles[first : first + count].tolist()
        begin, end = tiles[0][0], tiles[-1][0] + tiles[-1][1]
        ends = [(tile[0] + tile[1] - begin, tile[3]) for tile in tiles if tile[3] >= 0]
        sums[begin:end] = _window(inputs[begin:end], taps, last, tiles[0][2], ends)
    out = (sums if bias is None else sums + bias.float()).to(x.dtype)
    return channels.gated(silu(out) if channels.has_silu else out, x)


def _step(
    inputs: torch.Tensor, taps: torch.Tensor, last: torch.Tensor, steps: list[tuple[int, int, int]], sums: torch.Tensor
) -> None:
    """The next token of several sequences: their rows, and the blocks read and written."""
    rows, sources, targets = (list(each) for each in zip(*steps, strict=True))
    before = last[sources]
    if new := [at for at, source in enumerate(sources) if source < 0]:
        before[new] = 0.0
    known = torch.cat((before, inputs[rows, None]), dim=1)  # [S, K, C]
    last[targets] = known[:, 1:]
    sums[rows] = (known.float() * taps).sum(dim=1)


def _window(
    inputs: torch.Tensor, taps: torch.Tensor, last: torch.Tensor, source: int, ends: list[tuple[int, int]]
) -> torch.Tensor:
    """The sums [n, C] over one sequence's new inputs [n, C]; keeps the inputs before each end in its block."""
    before = last.new_zeros(last.shape[1:]) if source < 0 else last[source]
    known = torch.cat((before, inputs))
    for end, block in ends:
        last[block] = known[end : end + len(before)]
    count, wide = len(inputs), known.float()
    sums = wide[:count] * taps[0]
    for tap in range(1, len(taps)):
        sums.addcmul_(wide[tap : tap + count], taps[tap])
    return sums
