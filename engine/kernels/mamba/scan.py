"""The scan of Mamba-2 in plain torch. T tokens, H heads, P their size, G groups, N the size of keys and queries.

For each head, with a token's step d and value v: S = exp(-exp(decay) d) S + k (d v)^T; the output is S^T q + skip v.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import softplus

from engine.kernels.delta.plan import StateBatch
from engine.kernels.delta.walk import walk
from engine.kernels.device import twin
from engine.kernels.mamba.heads import MambaHeads


@twin("engine.kernels.mamba.triton_scan")
def scan(
    mixed: torch.Tensor,
    x: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
    heads: MambaHeads,
) -> torch.Tensor:
    """Return the outputs [T, H P] in the dtype of `mixed`; change the states in the pool.

    `mixed` [T, C] are values, keys and queries from `convolve`; `x` [T, N] ends with the steps, of which softplus is taken with
    `bias`. `decay`, `bias` and `skip` [H] are float32, `states` [num_blocks, 1, 1, H, N P] float32 is a strided view of the pool.
    """
    v, k, q = mixed.float().split((heads.size, heads.keys_size, heads.keys_size), dim=1)
    v = v.unflatten(1, (heads.num_heads, heads.head_dim))
    k, q = (part.unflatten(1, (heads.groups, heads.state_size)) for part in (k, q))
    steps = x[:, heads.first_step : heads.num_columns].float() + bias
    steps = softplus(steps).clamp(heads.shortest, heads.longest)
    g, added = -decay.exp() * steps, steps[:, :, None] * v
    kept = states[:, 0, 0].unflatten(-1, (heads.state_size, heads.head_dim))  # [num_blocks, H, N, P]
    out = torch.empty_like(v)
    step, tile = (partial(each, heads=heads) for each in (_step, _tile))
    walk((q, k, added, g), kept, out, batch, step=step, tile=tile)
    return (out + skip[:, None] * v).to(mixed.dtype).flatten(1)


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, added: torch.Tensor, g: torch.Tensor, *, heads: MambaHeads
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of a sequence: output [H, P], and the state after it."""
    q, k = (part.repeat_interleave(heads.heads_of_a_group, dim=0)[:, :, None] for part in (q, k))
    state = state * g.exp()[:, None, None] + k * added[:, None]
    return (state * q).sum(dim=1), state


def _tile(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, added: torch.Tensor, g: torch.Tensor, *, heads: MambaHeads
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence at once: outputs [n, H, P], and the state after them."""
    q, k, added = (part.transpose(0, 1) for part in (q, k, added))  # [G, n, N], [H, n, P]
    total = g.cumsum(dim=0).T[:, :, None]  # [H, n, 1]
    ratios = (total - total.transpose(1, 2)).tril().exp().tril()  # [H, n, n]: decay from one token to a later one
    seen = (q @ k.transpose(1, 2)).repeat_interleave(heads.heads_of_a_group, dim=0) * ratios
    q, k = (part.repeat_interleave(heads.heads_of_a_group, dim=0) for part in (q, k))
    out = total.exp() * (q @ state) + seen @ added
    last = total[:, -1:]
    state = last.exp() * state + (k * (last - total).exp()).transpose(1, 2) @ added
    return out.transpose(0, 1), state
