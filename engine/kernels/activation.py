"""Activations of MLPs. T tokens, I intermediate size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, relu, silu

from engine.kernels.twin import twin


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": gelu,
    "relu2": _relu2,
}


@twin("engine.kernels.triton_activation")
def act_and_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return act(gate) * up [T, I] for `gate_up` [T, 2 I], the two halves side by side; "silu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
