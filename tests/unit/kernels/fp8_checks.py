"""Checks of products with 8-bit floats against float64 of the weights that they stand for.

`test_triton.py` runs them in Triton's interpreter, `tests/gpu/test_kernels.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from engine.kernels.quantised import fp8
from engine.kernels.quantised.fp8 import FP8, Fp8Matrix, Fp8Rows
from tests.unit.kernels import references
from tests.unit.kernels.references import close
from tests.unit.kernels.rounding import rounds_as_a_gpu
from tests.unit.kernels.triton_checks import checking

BLOCKS: dict[str, tuple[int, int] | None] = {"rows": None, "blocks": (128, 128), "blocks_of_a_row": (1, 128)}
# Rounding a row to 3 bits of mantissa changes each of its elements by up to 1 / 16.
ROUNDED = 0.05


def matrix(num_outputs: int, num_inputs: int, block: tuple[int, int] | None, device: str) -> Fp8Matrix:
    weight = (60 * torch.randn(num_outputs, num_inputs, device=device)).clamp(-448, 448).to(FP8)
    rows, inputs = block or (1, num_inputs)
    scale = 0.5 + torch.rand(-(-num_outputs // rows), -(-num_inputs // inputs), device=device)
    scale = scale / (60 * num_inputs**0.5)
    return Fp8Matrix(weight, scale if block else scale[:, 0].contiguous(), block)


def plain(value: Fp8Matrix) -> torch.Tensor:
    """By the definition, element by element."""
    rows, columns = (torch.arange(size, device=value.weight.device) for size in value.weight.shape)
    if value.block is None:
        return value.weight.double() * value.scale.double()[:, None]
    scale = value.scale.double()[rows[:, None] // value.block[0], columns[None, :] // value.block[1]]
    return value.weight.double() * scale


def near(found: torch.Tensor, expected: torch.Tensor, rounded: bool) -> None:
    """As near as the activations' rounding to 8 bits allows; without it, as any product."""
    assert torch.isfinite(found).all()
    if rounded:
        error = (found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < ROUNDED, f"relative error {error:.4f}"
    else:
        close(found, expected, torch.float16 if found.dtype is torch.float16 else found.dtype)


def check_products(block: tuple[int, int] | None, device: str, large: bool) -> None:
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    shapes = [(1, 100, 512), (33, 70, 256), (70, 132, 256), (2, 64, 192), (130, 64, 144)]
    shapes += [(rows, n, k) for rows in (1, 8, 33, 64, 100, 300) for n, k in ((6144, 4096), (4096, 14336))] * large
    for index, (rows, num_outputs, num_inputs) in enumerate(shapes):
        if block is not None and num_inputs % block[1]:
            continue
        x = torch.randn(rows, num_inputs, device=device).to(dtype)
        weight = matrix(2 * num_outputs, num_inputs, block, device)
        rounded = rows > 64 or num_inputs % 64 != 0
        biases = (None, torch.randn(2 * num_outputs, device=device).to(dtype))
        for bias in biases if large else biases[index % 2 : index % 2 + 1]:
            expected = x.double() @ plain(weight).T + (0 if bias is None else bias.double())
            near(fp8.product(x, weight, bias), expected, rounded)
            into = torch.empty(rows, 2 * num_outputs, device=device, dtype=dtype)
            assert fp8.product(x, weight, bias, out=into) is into
            near(into, expected, rounded)
            parts = fp8.product_parts(x, weight, bias)
            near(parts.sum(dim=0).to(dtype) if parts.dim() == 3 else parts, expected, rounded)
            near(fp8.gated_product(x, weight, bias), references.silu_and_mul(expected), rounded)


def check_rows(group: int | None, device: str, large: bool) -> None:
    for dtype in (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16):
        for rows, inputs in [(3, 256), (2, 384), (1, 128)] + [(300, 4096), (7, 28672)] * large:
            x = 3 * torch.randn(rows, inputs, device=device).to(dtype)
            x[0, :128] = 0
            same(fp8.quantise_rows(x, group), x, group)
            same(fp8.quantise_rows(x.repeat(1, 2)[:, :inputs], group), x, group)


def check_fused(group: int | None, device: str, large: bool) -> None:
    """Norms and activations that round what they write."""
    for dtype in (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16):
        for rows, features in [(3, 256), (2, 384)] + [(300, 4096), (70, 14336)] * large:
            x, residual = torch.randn(2, rows, features, device=device).to(dtype).unbind(0)
            weight = torch.randn(features, device=device).to(dtype)
            for added in (None, x, torch.randn(3, rows, features, device=device)):
                for plus_one in (False, True):
                    options = {"plus_one": plus_one, "group": group}
                    found, total = fp8.normed_rows(residual, added, weight, 1e-5, **options)
                    expected, sums = fp8.normed_rows.reference(residual, added, weight, 1e-5, **options)
                    close(total, sums.double())
                    alike(found, expected)
            for activation in ("silu", "gelu_tanh"):
                gate_up = 3 * torch.randn(rows, 2 * features, device=device).to(dtype)
                alike(fp8.gated_rows(gate_up, activation, group), fp8.gated_rows.reference(gate_up, activation, group))


def same(found: Fp8Rows, x: torch.Tensor, group: int | None) -> None:
    """As the plain version rounds `x`."""
    alike(found, fp8.quantise_rows.reference(x, group))


def alike(found: Fp8Rows, expected: Fp8Rows) -> None:
    """But for values on the edge between two others."""
    # What is rounded has been rounded to the activations' type before, sometimes to the number beside.
    step = 1e-2 if found.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(found.scale, expected.scale, rtol=step, atol=0)
    torch.testing.assert_close(found.values.float(), expected.values.float(), rtol=0.13, atol=2**-9)
    exact = (found.values.float() == expected.values.float()).float().mean()
    assert exact > (0.9 if found.dtype == torch.bfloat16 else 0.97), (
        f"{1 - exact:.3f} of the values are rounded in another way"
    )


CHECKS: dict[str, Callable[[str, bool], None]] = {
    **{name: lambda device, large, block=block: check_products(block, device, large) for name, block in BLOCKS.items()},
    "rounded_rows": lambda device, large: check_rows(None, device, large),
    "rounded_groups": lambda device, large: check_rows(128, device, large),
    "fused_rows": lambda device, large: check_fused(None, device, large),
    "fused_groups": lambda device, large: check_fused(128, device, large),
}


def run(name: str, device: str, *, large: bool) -> None:
    with checking(device), rounds_as_a_gpu() if device == "cpu" else nullcontext():
        CHECKS[name](device, large)


def interpret(name: str) -> None:
    run(name, "cpu", large=False)
