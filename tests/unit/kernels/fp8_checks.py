"""Checks of products with 8-bit floats against float64 of the weights that they stand for.

`test_triton.py` runs them in Triton's interpreter, `tests/gpu/test_kernels.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from engine.kernels.quantised import fp8
from engine.kernels.quantised.fp8 import FP8, Fp8Matrix, Fp8Rows, Rounding, rounding_of
from engine.kernels.quantised.groups import IN_PARTS
from tests.unit.kernels import references
from tests.unit.kernels.references import close
from tests.unit.kernels.rounding import rounds_as_a_gpu
from tests.unit.kernels.triton_checks import checking

BLOCKS: dict[str, tuple[int, int] | None] = {"rows": None, "blocks": (128, 128), "blocks_of_a_row": (1, 128)}
# Rounding a row to 3 bits of mantissa changes each of its elements by up to 1 / 16.
ROUNDED = 0.05
ROUNDINGS = {
    "rows": Rounding(),
    "groups": Rounding(128),
    "parts": Rounding(128, 2),
    "parts_of_small_groups": Rounding(64, 3),
    "parts_for_codes": IN_PARTS,
}
# Tensor cores of Hopper keep about 14 bits of a sum of 8-bit floats.
OF_A_GROUP = 1e-3


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
    shapes += [(rows, n, k) for rows in (1, 8, 33, 64, 100, 101, 300) for n, k in ((6144, 4096), (4096, 14336))] * large
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


def check_products_of_rows(block: tuple[int, int] | None, device: str, large: bool) -> None:
    """Rows that add up to what they were made of, and gated products that become such rows."""
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    shapes = [(1, 128, 256), (9, 256, 128), (3, 100, 192)]
    shapes += [(rows, n, 4096) for rows in (1, 8, 16, 17, 64) for n in (14336, 1792)] * large
    for rows, num_outputs, num_inputs in shapes:
        if block is not None and num_inputs % block[1]:
            continue
        x = torch.randn(rows, num_inputs, device=device).to(dtype)
        weight = matrix(2 * num_outputs, num_inputs, block, device)
        bias = torch.randn(2 * num_outputs, device=device).to(dtype)
        rounded = fp8.quantise_rows(x, rounding_of(weight, rows, dtype))
        own = (rounded.values, rounded.scale, weight)
        expected = x.double() @ plain(weight).T + bias.double()
        near(fp8.product_of_rows(*own, bias, dtype), expected, False)
        gated = fp8.gated_product_of_rows(*own, bias, dtype)
        near(gated, references.silu_and_mul(expected), False)
        followings = [rounding_of(matrix(64, num_outputs, None, device), rows, dtype)]
        followings += [Rounding(128, 2, for_codes=True)] * (num_outputs % 128 == 0)
        for following in followings:
            found = fp8.rounded_gated_product(*own, bias, dtype, following)
            alike(found, fp8.quantise_rows.reference(gated, following))


def check_parts(device: str) -> None:
    """Numbers of 16 bits are the sum of their parts, within 2^-16 of their group's largest."""
    for dtype, parts in ((torch.bfloat16, 2), (torch.float16, 3)):
        if device == "cpu" and dtype == torch.bfloat16:
            # The interpreter doesn't know bfloat16: its numbers in float32.
            dtype = torch.float32
        x = torch.randn(3, 512, device=device) * torch.exp(2 * torch.randn(3, 512, device=device))
        x = x.to(torch.bfloat16 if parts == 2 else torch.float16).to(dtype)
        x[1] = 0
        x[2, :128] = torch.tensor([2.0**-60, 1.0])[:, None].expand(2, 64).flatten() if dtype != torch.float16 else 0
        x[2, 128] = -x[2].abs().max()
        rows = fp8.quantise_rows(x, Rounding(128, parts))
        sums = rows.values.double().sum(dim=1).unflatten(-1, (-1, 128)) * rows.scale.double()[..., None]
        wide = x.double().unflatten(-1, (-1, 128))
        assert (torch.frexp(rows.scale).mantissa == 0.5).all(), "scales are powers of 2"
        assert ((sums - wide).abs() <= 2.0**-16 * wide.abs().amax(-1, keepdim=True)).all()


def check_rows(rounding: Rounding, device: str, large: bool) -> None:
    for dtype in (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16):
        for rows, inputs in [(3, 256), (2, 384), (1, 128)] + [(300, 4096), (7, 28672)] * large:
            x = 3 * torch.randn(rows, inputs, device=device).to(dtype)
            x[0, :128] = 0
            same(fp8.quantise_rows(x, rounding), x, rounding)
            same(fp8.quantise_rows(x.repeat(1, 2)[:, :inputs], rounding), x, rounding)


def check_fused(rounding: Rounding, device: str, large: bool) -> None:
    """Norms and activations that round what they write."""
    for dtype in (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16):
        for rows, features in [(3, 256), (2, 384)] + [(300, 4096), (70, 14336)] * large:
            x, residual = torch.randn(2, rows, features, device=device).to(dtype).unbind(0)
            weight = torch.randn(features, device=device).to(dtype)
            for added in (None, x, torch.randn(3, rows, features, device=device)):
                for plus_one in (False, True):
                    operands = (residual, added, weight, 1e-5, rounding)
                    found, total = fp8.normed_rows(*operands, plus_one=plus_one)
                    expected, sums = fp8.normed_rows.reference(*operands, plus_one=plus_one)
                    close(total, sums.double())
                    alike(found, expected)
            for activation in ("silu", "gelu_tanh"):
                gate_up = 3 * torch.randn(rows, 2 * features, device=device).to(dtype)
                found = fp8.gated_rows(gate_up, rounding, activation)
                alike(found, fp8.gated_rows.reference(gate_up, rounding, activation))


def same(found: Fp8Rows, x: torch.Tensor, rounding: Rounding) -> None:
    """As the plain version rounds `x`."""
    alike(found, fp8.quantise_rows.reference(x, rounding))


def alike(found: Fp8Rows, expected: Fp8Rows) -> None:
    """But for values on the edge between two others."""
    if found.values.dim() == 3:
        alike_in_sum(found, expected)
        return
    # What is rounded has been rounded to the activations' type before, sometimes to the number beside.
    step = 1e-2 if found.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(found.scale, expected.scale, rtol=step, atol=0)
    torch.testing.assert_close(found.values.float(), expected.values.float(), rtol=0.13, atol=2**-9)
    exact = (found.values.float() == expected.values.float()).float().mean()
    assert exact > (0.9 if found.dtype == torch.bfloat16 else 0.97), (
        f"{1 - exact:.3f} of the values are rounded in another way"
    )


def alike_in_sum(found: Fp8Rows, expected: Fp8Rows) -> None:
    """A number may be the one beside, and a group that begins with it have another scale."""
    sums = []
    for rows in (found, expected):
        scale = rows.scale if rows.scale.dim() == 2 else rows.scale[0].T
        wide = rows.values.double().sum(dim=1).unflatten(-1, (scale.shape[-1], -1))
        sums.append((wide * scale.double()[..., None]).flatten(-2))
        if rows.scale.dim() == 3:  # for codes
            of_groups = sums[-1].unflatten(-1, (scale.shape[-1], -1)).sum(dim=-1)
            assert ((rows.scale[1].T - of_groups).abs() <= 8 * scale).all()
    # Two parts have eight bits: of more, one number may be rounded up and its neighbour down.
    step = 1e-2 if found.dtype == torch.bfloat16 or found.values.shape[1] == 2 else 2e-3
    largest = sums[1].abs().amax(-1, keepdim=True)
    assert ((sums[0] - sums[1]).abs() <= step * sums[1].abs() + 2.0**-10 * largest).all()
    # A product keeps fewer bits of its sum than of a number.
    assert ((sums[0] - sums[1]).square().mean() <= (OF_A_GROUP**2 + step**2 / 4) * sums[1].square().mean()).all()


CHECKS: dict[str, Callable[[str, bool], None]] = {
    **{name: lambda device, large, block=block: check_products(block, device, large) for name, block in BLOCKS.items()},
    **{
        f"{name}_of_parts": lambda device, large, block=block: check_products_of_rows(block, device, large)
        for name, block in BLOCKS.items()
    },
    **{
        f"rounded_{name}": lambda device, large, each=each: check_rows(each, device, large)
        for name, each in ROUNDINGS.items()
    },
    **{
        f"fused_{name}": lambda device, large, each=each: check_fused(each, device, large)
        for name, each in ROUNDINGS.items()
    },
    "parts": lambda device, large: check_parts(device),
}


def run(name: str, device: str, *, large: bool) -> None:
    with checking(device), rounds_as_a_gpu() if device == "cpu" else nullcontext():
        CHECKS[name](device, large)


def interpret(name: str) -> None:
    run(name, "cpu", large=False)
