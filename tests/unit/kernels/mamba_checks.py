"""Mamba-2's scan and gate, in plain torch and in Triton, against a loop over tokens in float64.

`test_mamba.py` runs the Triton kernels in the interpreter, `tests/gpu/test_kernels.py` calls them on a GPU.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from engine.kernels import mamba
from engine.kernels.mamba import MambaHeads
from tests.unit.kernels.state_passes import NUM_BLOCKS, Sequence, StatePass, check_states, close, passes
from tests.unit.kernels.triton_checks import poisoned

SPECS = {
    "small": MambaHeads(num_heads=4, head_dim=16, groups=2, state_size=16, taps=4),
    "bounded": MambaHeads(
        num_heads=2, head_dim=24, groups=1, state_size=20, taps=2, shortest=0.4, longest=0.9, norm="before"
    ),
    "odd": MambaHeads(num_heads=6, head_dim=40, groups=3, state_size=33, taps=3, norm_groups=3, norm="none"),
    "groups": MambaHeads(num_heads=4, head_dim=12, groups=4, state_size=17, taps=3, norm_groups=4),
    "large": MambaHeads(num_heads=64, head_dim=64, groups=8, state_size=128, taps=4, norm_groups=8),
    "wide": MambaHeads(num_heads=24, head_dim=128, groups=1, state_size=256, taps=4, norm="none"),
}
BLOCK_SIZES = {"small": 16, "bounded": 8, "odd": 64, "groups": 32, "large": 1024, "wide": 256}


def run(name: str, device: str) -> None:
    heads = SPECS[name]
    dtypes = (
        [torch.float32 if name == "small" else torch.float16] if device == "cpu" else [torch.float32, torch.bfloat16]
    )
    for dtype in dtypes:
        for each in passes(BLOCK_SIZES[name], device):
            _check_scan(heads, each, dtype, device)
        _check_gate(heads, dtype, device)


def interpret(name: str) -> None:
    run(name, "cpu")


def _check_scan(heads: MambaHeads, of: StatePass, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(of.num_rows, heads.num_columns + 3, device=device).to(dtype)
    mixed = (torch.randn(of.num_rows, heads.channels.count, device=device) * 0.5).to(dtype)
    rates = torch.randn(3, heads.num_heads, device=device)
    pool = torch.randn(NUM_BLOCKS, 3, heads.num_heads * heads.state_size * heads.head_dim, device=device)
    states = pool[:, 1:2].view(NUM_BLOCKS, 1, 1, heads.num_heads, -1)
    before = pool.clone()
    with poisoned():
        out = mamba.scan(mixed, x, *rates, states, of.batch, heads)
    check_states(of, out, pool, before, dtype, lambda sequence: _expected(heads, of, sequence, mixed, x, rates, before))


def _expected(
    heads: MambaHeads,
    of: StatePass,
    sequence: Sequence,
    mixed: torch.Tensor,
    x: torch.Tensor,
    rates: torch.Tensor,
    pool: torch.Tensor,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The outputs, and each written place's state."""
    rows = slice(sequence.row, sequence.row + sequence.count)
    v, k, q = mixed[rows].double().split((heads.size, heads.keys_size, heads.keys_size), dim=1)
    v = v.view(-1, heads.num_heads, heads.head_dim)
    of_head = torch.arange(heads.num_heads, device=x.device) // heads.heads_of_a_group
    k, q = (part.view(-1, heads.groups, heads.state_size)[:, of_head] for part in (k, q))
    decay, bias, skip = rates.double()
    steps = softplus(x[rows, heads.first_step : heads.num_columns].double() + bias)
    steps = steps.clamp(heads.shortest, heads.longest)
    state = v.new_zeros(heads.num_heads, heads.state_size, heads.head_dim)
    if sequence.start:
        state = pool[of.place(sequence, sequence.start - 1), 1].double().view_as(state)
    out, behind = [], {}
    for at in range(sequence.count):
        state = state * (-decay.exp() * steps[at]).exp()[:, None, None]
        state = state + torch.einsum("hn,hp->hnp", k[at], steps[at][:, None] * v[at])
        out.append((torch.einsum("hnp,hn->hp", state, q[at]) + skip[:, None] * v[at]).flatten())
        behind[of.place(sequence, sequence.start + at)] = state
    return torch.stack(out), behind


def _check_gate(heads: MambaHeads, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5, heads.num_columns + 3, device=device).to(dtype)
    out, weight = torch.randn(5, heads.size, device=device).to(dtype), torch.randn(heads.size, device=device).to(dtype)
    z, wanted = x[:, : heads.size].double(), out.double()
    z = z * z.sigmoid()
    if heads.norm == "none":
        close(mamba.gate(out, x, None, 1e-6, heads), wanted * z, dtype)
        return
    wanted = wanted * z if heads.norm == "after" else wanted
    parts = wanted.view(5, heads.norm_groups, -1)
    parts = parts / (parts.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    wanted = parts.flatten(1) * weight.double() * (z if heads.norm == "before" else 1)
    close(mamba.gate(out, x, weight, 1e-6, heads), wanted, dtype)
