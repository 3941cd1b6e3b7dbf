"""Matrix products with weights. T tokens, K inputs, N outputs, I intermediate size, P partial sums.

On a GPU, products of few rows (decoding) run in our own kernel, which streams the weights at memory speed; many rows go to
the vendor's library, which is at the tensor cores' limit there.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear

from engine.kernels import activation
from engine.kernels.backend import use_triton


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N] for `x` [T, K] and `weight` [N, K], in `out` if it is given."""
    if use_triton(x):
        from engine.kernels.triton_linear import linear as kernel

        return kernel(x, weight, bias, parts=False, out=out)
    return reference(x, weight, bias, out=out)


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Like `linear`, or [P, T, N] float32 whose sum over P it is: for a kernel that sums up (`norm`, `rope`) as it reads."""
    if use_triton(x):
        from engine.kernels.triton_linear import linear as kernel

        return kernel(x, weight, bias, parts=True)
    return torch_linear(x, weight, bias)


def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Add the product to `residual` [T, N] in place and return None, or leave it alone and return what `linear_parts` returns.

    Which is cheaper depends on the number of rows; `norm.add_rms_norm` takes both.
    """
    if use_triton(x):
        from engine.kernels.triton_linear import linear_onto as kernel

        return kernel(residual, x, weight, bias)
    return reference(x, weight, bias)


def gated_linear(x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return silu(x @ gate.T) * (x @ up.T) [T, I] for `gate_up` [2 I, K], the gate's rows first; `bias` [2 I]."""
    if use_triton(x):
        from engine.kernels.triton_linear import gated_linear as kernel

        return kernel(x, gate_up, bias)
    return activation.reference(torch_linear(x, gate_up, bias))


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin of `linear` and `linear_parts`."""
    result = torch_linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def gated_reference(x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The twin of `gated_linear`."""
    return activation.reference(torch_linear(x, gate_up, bias))
