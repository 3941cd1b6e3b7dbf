"""The selective scan of Mamba (Gu and Dao, 2023) in plain torch. T tokens, D channels, N elements of a channel's state.

For each channel, with a token's step d and value v: S = exp(d rate) S + d v k; the output is (q . S + skip v) silu(z). Rates are
each channel's and state's own, so no product of matrices computes several tokens: on a processor a few are prepared at once.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from engine.kernels.delta.plan import CARRIED, StateBatch
from engine.kernels.device import twin
from engine.kernels.norm import rms_norm

# Tokens of a prompt whose decays are computed at once: more of them exceed the processor's cache.
PIECE = 8


@twin("engine.kernels.mamba.triton_selective")
def selective_scan(
    mixed: torch.Tensor,
    x: torch.Tensor,
    steps: torch.Tensor,
    shared: torch.Tensor,
    rates: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    """Return the outputs [T, D] in the dtype of `mixed`; change the states in the pool.

    `mixed` [T, D] are values from `convolve`; z are the last D columns of the product `x` [T, 2 D]. Of `steps` [T, D] softplus is
    taken with `bias`; `shared` [T, 2 N] are keys and queries. `rates` [D, N] (below zero), `bias` and `skip` [D] are float32.
    `states` [num_blocks, 1, 1, D, N] float32 is a strided view of the pool.
    """
    values = mixed.float()
    lengths = softplus(steps.float() + bias)
    tokens = (lengths, lengths * values, *shared.float().chunk(2, dim=1))
    out, kept = torch.zeros_like(values), states[:, 0, 0]
    for moves in batch.steps():
        rows, sources, targets = (list(each) for each in zip(*moves, strict=True))
        out[rows], kept[targets] = _step(_states(kept, sources), *(part[rows] for part in tokens), rates=rates)
    for first, count in batch.runs.tolist():
        state = kept.new_zeros(0)
        for begin, length, source, target, *_ in batch.tiles[first : first + count].tolist():
            if source != CARRIED:
                (state,) = _states(kept, [source])
            own = slice(begin, begin + length)
            out[own], state = _tile(state, *(part[own] for part in tokens), rates=rates)
            if target >= 0:
                kept[target] = state
    return ((out + skip * values) * silu(x[:, values.shape[1] :].float())).to(mixed.dtype)


def _states(kept: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """Copies of the states in these blocks; zeros for negative ones."""
    found = kept[blocks]
    if new := [at for at, block in enumerate(blocks) if block < 0]:
        found[new] = 0.0
    return found


def _step(
    states: torch.Tensor,
    lengths: torch.Tensor,
    added: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    *,
    rates: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of several sequences: outputs [S, D], and the states after them."""
    own, decays = _prepared(lengths, added, k, rates)
    own.addcmul_(decays, states)
    return _read(own, q), own


def _tile(
    state: torch.Tensor,
    lengths: torch.Tensor,
    added: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    *,
    rates: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence: outputs [n, D], and the state after them."""
    found = []
    for of_lengths, of_added, of_k, of_q in zip(*(part.split(PIECE) for part in (lengths, added, k, q)), strict=True):
        own, decays = _prepared(of_lengths, of_added, of_k, rates)
        # The recurrence of one token: a single in-place operation.
        for each, decay in zip(own.unbind(), decays.unbind(), strict=True):
            state = each.addcmul_(decay, state)
        found.append(_read(own, of_q))
    return torch.cat(found), state


def _prepared(
    lengths: torch.Tensor, added: torch.Tensor, k: torch.Tensor, rates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's addition to the state, and the decay of the state before it, [n, D, N]."""
    return added[:, :, None] * k[:, None], (lengths[:, :, None] * rates).exp_()


def _read(states: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (states @ q[:, :, None])[:, :, 0]


@twin("engine.kernels.mamba.triton_selective")
def three_norms(x: torch.Tensor, weight: torch.Tensor, eps: float, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm of the first `rank` columns of x [T, R + 2 N], and of each half of the others, side by side [T, 2 N].

    `weight` [R + 2 N].
    """
    half = (x.shape[1] - rank) // 2
    parts = zip(x.split((rank, half, half), dim=1), weight.split((rank, half, half)), strict=True)
    few, k, q = (rms_norm.reference(part, own, eps) for part, own in parts)
    return few, torch.cat((k, q), dim=1)
