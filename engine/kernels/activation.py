"""The gated activation of the MLP. T tokens, I intermediate size."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.kernels.twin import twin


@twin("engine.kernels.triton_activation")
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] for `gate_up` [T, 2 I], the two halves side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
