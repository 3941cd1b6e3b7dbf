"""Checks of products with groups of 4 and 8 bits against float64 of the dequantised weights.

`test_triton.py` runs them in Triton's interpreter, `tests/gpu/test_kernels.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.quantised import fp8, groups
from engine.kernels.quantised.groups import E2M1, Groups, pack
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import Suite, _dtypes, check_forms


@dataclass(frozen=True, slots=True)
class Kind:
    """What a format needs of the layout."""

    bits: int
    group: int  # 0: all inputs
    lower: str = ""  # "zeros", "minimums"
    is_e2m1: bool = False
    has_exponents: bool = False  # scales are powers of 2, in bfloat16
    has_levels: bool = False  # and scales of 32 bits


KINDS = {
    "awq": Kind(4, 128, "zeros"),
    "gptq": Kind(4, 128),
    "gptq_8": Kind(8, 128, "zeros"),
    "channels": Kind(4, 0),
    "channels_8": Kind(8, 0),
    "w4_32": Kind(4, 32),
    "w4_64": Kind(4, 64, "zeros"),
    "q4_k": Kind(4, 32, "minimums"),
    "q5_k": Kind(8, 32, "minimums"),
    "q6_k": Kind(8, 16),
    "q8_0": Kind(8, 32),
    "mxfp4": Kind(4, 32, is_e2m1=True, has_exponents=True),
    "nvfp4": Kind(4, 16, is_e2m1=True),
    "nf4": Kind(4, 64, has_levels=True),
    "nf4_16": Kind(4, 16, has_levels=True),
    "nf4_128": Kind(4, 128, has_levels=True),
}


def matrix(kind: Kind, num_outputs: int, num_inputs: int, device: str) -> tuple[Groups, torch.Tensor]:
    """Return a random matrix and its elements in float64, computed as the format is defined."""
    group = kind.group or num_inputs
    num_groups = -(-num_inputs // group)
    highest = 1 << kind.bits
    codes = torch.randint(0, highest, (num_outputs, num_inputs), device=device)
    unit = (1.0 if kind.has_levels else 6.0 if kind.is_e2m1 else highest / 2) * num_inputs**0.5
    scales = (0.5 + torch.rand(num_outputs, num_groups, device=device)) / unit
    levels = torch.randn(16, device=device) if kind.has_levels else None
    scales = scales if kind.has_levels else scales.half()
    if kind.has_exponents:
        scales = scales.float().log2().round().exp2().bfloat16()
    lower: dict[str, torch.Tensor] = {}
    if kind.lower == "zeros":
        lower["zeros"] = torch.randint(0, highest + 1, scales.shape, device=device)
    elif kind.lower == "minimums":
        lower["minimums"] = torch.randn(scales.shape, device=device) / num_inputs**0.5
    group_of = torch.arange(num_inputs, device=device) // group
    values = codes.double()
    if kind.is_e2m1:
        table = torch.tensor(E2M1, dtype=torch.float64, device=device)
        values = table[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)
    elif levels is not None:
        values = levels.double()[codes]
    elif not lower:
        values = values - highest // 2
    if "zeros" in lower:
        values = values - lower["zeros"][:, group_of]
    values = values * scales.double()[:, group_of]
    if "minimums" in lower:
        values = values + lower["minimums"].double()[:, group_of]
    packed = pack(codes, scales, bits=kind.bits, group=group, is_e2m1=kind.is_e2m1, levels=levels, **lower)
    return packed, values


def check_kind(name: str, device: str, large: bool) -> None:
    kind = KINDS[name]
    shapes = [(3, 20, 256), (17, 35, {0: 100, 16: 288, 32: 288, 64: 192}.get(kind.group, 128))]  # and no whole block
    shapes += [(rows, n, k) for rows in (1, 16, 40, 64, 300) for n, k in ((6144, 4096), (2880, 2880))] * large
    for dtype in _dtypes(device)[1:]:
        for rows, num_outputs, num_inputs in shapes:
            if num_inputs % (kind.group or 1) == 0:  # what the format can hold
                _check_products(kind, dtype, rows, num_outputs, num_inputs, device)


def _check_products(kind: Kind, dtype: torch.dtype, rows: int, half: int, num_inputs: int, device: str) -> None:
    weight, values = matrix(kind, 2 * half, num_inputs, device)
    close(groups.dequantised(weight.codes, weight, dtype), values)
    x = torch.randn(rows, num_inputs, device=device).to(dtype)
    for bias in (None, torch.randn(2 * half, device=device).to(dtype)):
        expected = torch.nn.functional.linear(x.double(), values, None if bias is None else bias.double())
        check_forms(groups, x, weight, bias, expected)
        residual = torch.randn(rows, 2 * half, device=device).to(dtype)
        before = residual.clone()
        rest = groups.linear_onto(residual, x, weight, bias)
        if rest is not None:
            rest = rest.sum(dim=0) if rest.dim() == 3 else rest
        total = residual.double() if rest is None else residual.double() + rest.double()
        close(total.to(dtype), before.double() + expected)


def check_splits(device: str, large: bool) -> None:
    """A product that is cut over K, its last part the shorter."""
    weight, values = matrix(KINDS["awq"], 48, 2304, device)
    x = torch.randn(5, 2304, device=device).half()
    parts = groups.linear_parts(x, weight, None)
    assert parts.dim() == 3
    close(parts.sum(dim=0).half(), x.double() @ values.T)


def check_exactness(device: str, large: bool) -> None:
    """Few rows round no element: that alone would be ten times the error."""
    tolerance = 1e-4 if device != "cpu" else 1e-5  # tensor cores cut sums
    for name in ("awq", "w4_32", "q4_k", "q5_k", "q6_k", "nvfp4"):
        weight, values = matrix(KINDS[name], 8, 2304, device)
        x = torch.randn(5, 2304, device=device).half()
        parts = groups.linear_parts(x, weight, None)
        assert parts.dtype == torch.float32, name
        expected = x.double() @ values.T
        assert (parts.double().sum(dim=0) - expected).abs().max() < tolerance * expected.abs().max(), name


def check_two_floats_of_8(device: str, large: bool) -> None:
    """Few rows of bfloat16 round neither codes nor activations, and have more than 2^-7 of a row's largest one."""
    tolerance = 4e-3 if device != "cpu" else 1e-4
    shapes = [("awq", 3, 4096), ("gptq", 4, 4608), ("gptq", 12, 2304), ("awq", 20, 2304)]
    for name, rows, num_inputs in shapes + [("gptq", rows, 14336) for rows in (1, 8, 16, 32)] * large:
        weight, values = matrix(KINDS[name], 88, num_inputs, device)
        x = torch.randn(rows, num_inputs, device=device)
        x[0, 5], x[-1, 300:400] = 500, 0
        x = x.bfloat16()
        parts = groups.linear_parts(x, weight, None)
        assert parts.dtype == torch.float32, name
        expected = x.double() @ values.T
        assert (parts.double().sum(dim=0) - expected).abs().max() < tolerance * expected.abs().max(), name
        of_rows = fp8.quantise_rows.reference(x, groups.IN_PARTS)
        plain = groups.product_of_rows.reference(of_rows.values, of_rows.scale, weight, None)
        close(plain, expected)
        close(groups.product_of_rows(of_rows.values, of_rows.scale, weight, None), expected)
        gated = groups.gated_product_of_rows(of_rows.values, of_rows.scale, weight, None)
        close(gated, torch.nn.functional.silu(expected[:, :44]) * expected[:, 44:])


def check_many_rows(device: str, large: bool) -> None:
    weight, values = matrix(KINDS["q4_k"], 40, 128, device)
    x = torch.randn(70, 128, device=device).half()
    close(groups.linear(x, weight, None), x.double() @ values.T)


CHECKS: dict[str, Callable[[str, bool], None]] = {
    **{name: lambda device, large, name=name: check_kind(name, device, large) for name in KINDS},  # type: ignore[misc]
    "splits": check_splits,
    "exactness": check_exactness,
    "two_floats_of_8": check_two_floats_of_8,
    "many_rows": check_many_rows,
}

SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
