"""The delta rule with per-channel decay (Kimi's KDA), in plain torch. T tokens, H heads, Dk and Dv their sizes.

For each head, with a token's decays exp(g) [Dk] and strength beta: S = diag(exp(g)) S; S += k (beta (v - S^T k))^T; the output
is S^T q.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from engine.kernels.delta.plan import DeltaHeads, StateBatch
from engine.kernels.delta.rule import unit
from engine.kernels.delta.walk import walk
from engine.kernels.device import twin

# Tokens computed at once. Each pair has a decay for each channel, whose ratio across longer tiles is unbounded.
PIECE = 16


@twin("engine.kernels.delta.triton_channel_rule")
def channel_delta_rule(
    mixed: torch.Tensor,
    x: torch.Tensor,
    decays: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
    heads: DeltaHeads,
) -> torch.Tensor:
    """Return the outputs [T, H, Dv] in the dtype of `mixed`; change the states in the pool.

    As `delta_rule`, but g = -exp(decay) * softplus(decays + bias) for `decays` [T, H Dk], `decay` [H] and `bias` [H Dk] float32;
    `x` has b alone. Each key head has one value head.
    """
    q, k, v = mixed.float().split((heads.keys_size, heads.keys_size, heads.values_size), dim=1)
    q, k = (unit(part.unflatten(1, (-1, heads.key_dim))) for part in (q, k))
    q, v = q * heads.key_dim**-0.5, v.unflatten(1, (-1, heads.value_dim))
    beta = heads.view(x, heads.b, 1).flatten(1).float().sigmoid()
    g = -decay.exp()[:, None] * softplus(decays.float() + bias).unflatten(1, (-1, heads.key_dim))
    kept = states[:, 0, 0].unflatten(-1, (heads.key_dim, heads.value_dim))  # [num_blocks, H, Dk, Dv]
    out = torch.empty_like(v)
    walk((q, k, v, g, beta), kept, out, batch, step=_step, tile=_tile)
    return out.to(mixed.dtype)


def _step(state: torch.Tensor, *token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of a sequence: output [H, Dv] and the state after it."""
    out, state = _piece(state, *(part[None] for part in token))
    return out[0], state


def _tile(state: torch.Tensor, *tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence: outputs [n, H, Dv] and the state after them."""
    found = []
    for piece in zip(*(part.split(PIECE) for part in tokens), strict=True):
        out, state = _piece(state, *piece)
        found.append(out)
    return torch.cat(found), state


def _piece(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence at once: outputs [n, H, Dv] and the state after them. See `rule`."""
    q, k, v, total = (part.transpose(0, 1) for part in (q, k, v, g.cumsum(dim=0)))  # [H, n, D]
    beta, count = beta.T[:, :, None], k.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=k.device).tril()[None, :, :, None]
    # [H, n, n, Dk]: decay from one token to a later one
    ratios = (total[:, :, None] - total[:, None]).masked_fill(~later, float("-inf")).exp()
    ending = k[:, None] * ratios
    system = (beta * torch.einsum("hid,hijd->hij", k, ending)).tril(-1)
    wanted = beta * (v - (k * total.exp()) @ state)
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * total.exp()) @ state + torch.einsum("hid,hijd->hij", q, ending) @ added
    state = total[:, -1].exp()[:, :, None] * state + ending[:, -1].transpose(1, 2) @ added
    return out.transpose(0, 1), state
