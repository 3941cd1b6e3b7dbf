"""RMSNorm as a layer has it: its weight and epsilon."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight; `Stream.normed` computes it."""

    weight: torch.Tensor  # [E]
    eps: float
