"""One kernel at one shape, and how far it is from float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape; `exact` returns in float64 what `output` should return of the kernel's result."""

    name: str
    run: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    output: Callable[[torch.Tensor], torch.Tensor]
    num_bytes: float  # to read and write
    flops: float


def errors(case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative error, and that of rounding the exact result to `dtype`."""
    got, exact = case.output(case.run()).double(), case.exact()
    return relative(got, exact), relative(exact.to(dtype).double(), exact)


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())
