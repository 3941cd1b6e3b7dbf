"""Activations of MLPs, and gates of heads. T tokens, I intermediate size, Hq query heads, D head size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, relu, silu

from engine.kernels.device import twin


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


@twin("engine.kernels.triton_activation")
def erf_gelu_and_mul(gate_up: torch.Tensor, *, is_up_first: bool) -> torch.Tensor:
    """Return gelu(gate) * up [T, I], GELU by erf, for `gate_up` [T, 2 I]; `is_up_first`: the gate is the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    if is_up_first:
        gate, up = up, gate
    return gelu(gate) * up


@twin("engine.kernels.triton_activation")
def sparse_act_and_mul(gate_up: torch.Tensor, cutoff: float, activation: str) -> torch.Tensor:
    """Return act(rest) * up [T, I] for `gate_up` [T, 2 I]: the rest is the part of a gate above mean + `cutoff` * deviation.

    Mean and deviation are of a row's gates, in float32.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    deviation, mean = torch.std_mean(wide, dim=-1, keepdim=True, correction=0)
    return (ACTIVATIONS[activation](relu(wide - (mean + cutoff * deviation))) * up.float()).to(gate_up.dtype)


@twin("engine.kernels.triton_activation")
def gated_heads(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate) for `x` [T, Hq, D]: a head's gate follows its query in the rows of `product` [T, N]."""
    gate = product[:, : 2 * x.shape[1] * x.shape[2]].unflatten(1, (x.shape[1], 2, x.shape[2]))[:, :, 1]
    return (x.float() * gate.float().sigmoid()).to(x.dtype)
