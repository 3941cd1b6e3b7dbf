"""Products with groups of 4 bits on a CPU, by torch's kernel. T tokens, K inputs, N outputs, G groups of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.quantised.groups import Groups, codes_of

GROUPS_ON_CPU = (32, 64, 128)
_ROWS = 16  # N is a multiple of it
_ROWS_AT_ONCE = 1024  # while packing, each code takes four bytes


@dataclass(frozen=True, slots=True)
class CpuGroups:
    """A matrix [N, K] in torch's order: `(code - 8) * scale + offset`."""

    packed: torch.Tensor  # uint8 [N, K / 2]
    scales: torch.Tensor  # [G, N, 2] scales and offsets, in the dtype of the activations
    group: int


def suits_cpu(weight: Groups) -> bool:
    return (
        weight.bits == 4
        and not weight.is_e2m1
        and weight.group in GROUPS_ON_CPU
        and weight.inputs % weight.group == 0
        and weight.outputs % _ROWS == 0
    )


def for_cpu(weight: Groups, dtype: torch.dtype) -> CpuGroups:
    """Return the matrix as `cpu_linear` reads it."""
    slices = [
        weight.rows(at, min(at + _ROWS_AT_ONCE, weight.outputs)) for at in range(0, weight.outputs, _ROWS_AT_ONCE)
    ]
    packed = torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_of(rows).int(), 1) for rows in slices])
    scales = weight.scales.float()
    if weight.minimums is not None:
        offsets = weight.minimums.float() + 8 * scales
    else:
        offsets = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
    return CpuGroups(packed, torch.stack((scales, offsets), dim=-1).to(dtype), weight.group)


def cpu_linear(x: torch.Tensor, weight: CpuGroups, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N]. `x` [T, K] in the dtype of the scales."""
    product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), weight.packed, weight.group, weight.scales
    )
    return product if bias is None else product.add_(bias)
