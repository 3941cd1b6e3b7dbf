"""Matrix products with weights. T tokens, K inputs, N outputs, I intermediate size, P partial sums.

On a GPU, products of few rows (decoding) run in our own kernel, which streams the weights at memory speed; many rows go to the
vendor's library. On a CPU with instructions for bfloat16, oneDNN reads weights in an order of its own, twice as fast.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear

from engine.kernels.activation import ACTIVATIONS, act_and_mul
from engine.kernels.device import twin, use_triton
from engine.processor import has_avx512


def computes_in_bfloat16() -> bool:
    """True if this processor has bfloat16 instructions. Without them float32 is faster."""
    return has_avx512() and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return a CPU's weight [N, K] packed for oneDNN, or unchanged: for `linear` and its kin only.

    The products are bit by bit those of the plain weight.
    """
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.bfloat16
        or use_triton(weight)
        or not computes_in_bfloat16()
    ):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)


@twin("engine.kernels.triton_linear")
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N], in `out` if it is given. `x` [T, K], `weight` [N, K]."""
    result = _product(x, weight, bias)
    return result if out is None else out.copy_(result)


@twin("engine.kernels.triton_linear")
def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Like `linear`, or partial sums [P, T, N] float32 that the next kernel (`norm`, `rope`) adds as it reads."""
    return _product(x, weight, bias)


@twin("engine.kernels.triton_linear")
def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Add the product to `residual` [T, N] in place and return None, or leave it and return `linear_parts`' result.

    The number of rows decides which is cheaper; `norm.add_rms_norm` takes both.
    """
    return _product(x, weight, bias)


@twin("engine.kernels.triton_linear")
def activated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return act(x @ weight.T + bias) [T, N]; `activation`: one of `ACTIVATIONS`."""
    return ACTIVATIONS[activation](_product(x, weight, bias))


@twin("engine.kernels.triton_linear")
def gated_linear(
    x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Return act(x @ gate.T) * (x @ up.T) [T, I]. `gate_up` [2 I, K] and `bias` [2 I] hold the gate's rows first.

    `activation`: "silu" or "gelu_tanh".
    """
    return act_and_mul.reference(_product(x, gate_up, bias), activation)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not weight.is_mkldnn:
        return torch_linear(x, weight, bias)
    # oneDNN sums a single row in another order than several: padding to two rows keeps a row independent of its batch.
    if x.shape[0] > 1:
        return _by_onednn(x, weight, bias)
    return _by_onednn(torch.cat((x, x)), weight, bias)[:1]


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
