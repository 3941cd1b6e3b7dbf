"""Which twin runs: Triton on a GPU, plain torch elsewhere. Triton itself is imported only where it runs."""

from __future__ import annotations

import os

import torch

_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: its interpreter, for tests on the CPU


def use_triton(x: torch.Tensor) -> bool:
    """Whether the Triton version computes this tensor."""
    return x.is_cuda or _INTERPRET
