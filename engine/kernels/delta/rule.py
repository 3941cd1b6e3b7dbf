"""The gated delta rule in plain torch. T tokens, Hk key heads, Hv value heads, Dk and Dv their sizes.

For each value head, with a token's decay exp(g) and strength beta: S = exp(g) S; S += k (beta (v - S^T k))^T; the output
is S^T q.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from engine.kernels.delta.plan import DeltaHeads, StateBatch
from engine.kernels.delta.walk import walk
from engine.kernels.device import twin

NORM_EPS = 1e-6


@twin("engine.kernels.delta.triton_rule")
def delta_rule(
    mixed: torch.Tensor,
    x: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
    heads: DeltaHeads,
) -> torch.Tensor:
    """Return the outputs [T, Hv, Dv] in the dtype of `mixed`; change the states in the pool.

    `mixed` [T, C] are queries, keys and values from `convolve`; `x` [T, N] has b and a: beta = most_strength * sigmoid(b), g =
    -exp(decay) * softplus(a + bias), with `decay` and `bias` [Hv] float32. `states` [num_blocks, 1, 1, Hv, Dk Dv] float32 is a
    strided view of the pool. Queries and keys get the length 1, queries are scaled by Dk ** -0.5.
    """
    q, k, v = mixed.float().split((heads.keys_size, heads.keys_size, heads.values_size), dim=1)
    q, k = (unit(part.unflatten(1, (-1, heads.key_dim))).repeat_interleave(heads.ratio, dim=1) for part in (q, k))
    q, v = q * heads.key_dim**-0.5, v.unflatten(1, (-1, heads.value_dim))
    beta = heads.most_strength * heads.view(x, heads.b, heads.ratio).flatten(1).float().sigmoid()
    g = -decay.exp() * softplus(heads.view(x, heads.a, heads.ratio).flatten(1).float() + bias)
    kept = states[:, 0, 0].unflatten(-1, (heads.key_dim, heads.value_dim))  # [num_blocks, Hv, Dk, Dv]
    out = torch.empty_like(v)
    walk((q, k, v, g, beta), kept, out, batch, step=_step, tile=_tile)
    return out.to(mixed.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of a sequence: output [Hv, Dv] and the state after it."""
    state = state * g.exp()[:, None, None]
    known = (state * k[:, :, None]).sum(dim=1)
    state = state + k[:, :, None] * ((v - known) * beta[:, None])[:, None]
    return (state * q[:, :, None]).sum(dim=1), state


def _tile(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence at once: outputs [n, Hv, Dv] and the state after them.

    What each token adds depends on what those before it in the tile added: a triangular system of equations.
    """
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))  # [Hv, n, D]
    total, beta = g.cumsum(dim=0).T[:, :, None], beta.T[:, :, None]  # [Hv, n, 1]
    ratios = (total - total.transpose(1, 2)).tril().exp().tril()  # [Hv, n, n]: decay from one token to a later one
    system = (beta * (k @ k.transpose(1, 2)) * ratios).tril(-1)
    wanted = beta * (v - total.exp() * (k @ state))
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = total.exp() * (q @ state) + ((q @ k.transpose(1, 2)) * ratios).tril() @ added
    last = total[:, -1:]
    state = last.exp() * state + (k * (last - total).exp()).transpose(1, 2) @ added
    return out.transpose(0, 1), state
