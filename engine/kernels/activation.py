"""The gated activation of the MLP. T tokens, I intermediate size."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.kernels.backend import use_triton


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] for `gate_up` [T, 2 I], the two halves side by side."""
    if use_triton(gate_up):
        from engine.kernels.triton_activation import silu_and_mul as kernel

        return kernel(gate_up)
    return reference(gate_up)


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
