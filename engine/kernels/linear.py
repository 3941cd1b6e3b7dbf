"""Matrix products with weights. T tokens, K inputs, N outputs, I intermediate size, P partial sums.

On a GPU, products of few rows (decoding) run in our own kernel, which streams the weights at memory speed; many rows go to the
vendor's library.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear

from engine.kernels.activation import act_and_mul
from engine.kernels.twin import twin


@twin("engine.kernels.triton_linear")
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N], in `out` if it is given. `x` [T, K], `weight` [N, K]."""
    result = torch_linear(x, weight, bias)
    return result if out is None else out.copy_(result)


@twin("engine.kernels.triton_linear")
def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Like `linear`, or partial sums [P, T, N] float32 that the next kernel (`norm`, `rope`) adds up as it reads."""
    return torch_linear(x, weight, bias)


@twin("engine.kernels.triton_linear")
def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Add the product to `residual` [T, N] in place and return None, or leave it and return `linear_parts`' result.

    The number of rows decides which is cheaper; `norm.add_rms_norm` takes both.
    """
    return torch_linear(x, weight, bias)


@twin("engine.kernels.triton_linear")
def gated_linear(
    x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Return act(x @ gate.T) * (x @ up.T) [T, I]. `gate_up` [2 I, K] and `bias` [2 I] hold the gate's rows first.

    `activation`: "silu" or "gelu_tanh".
    """
    return act_and_mul.reference(torch_linear(x, gate_up, bias), activation)
