"""Which twin runs: Triton on a GPU, plain torch elsewhere. Triton itself is imported only where it runs."""

from __future__ import annotations

import functools
import os

import torch

_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: its interpreter, for tests on the CPU


def use_triton(x: torch.Tensor) -> bool:
    """Whether the Triton version computes this tensor."""
    return x.is_cuda or _INTERPRET


def programmatic_launch(x: torch.Tensor) -> bool:
    """Whether kernels may start before the one launched before them is over, and wait inside (Hopper and later)."""
    return x.is_cuda and _capability(x.device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of that generation, which has instructions that neither older nor newer ones have."""
    return device.type == "cuda" and _capability(device)[0] == 9


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
