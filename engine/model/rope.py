"""The table of rotations for every position, computed once in float32."""

from __future__ import annotations

import math

import torch

from engine.model.spec import Llama3Scaling, RopeSpec


def cos_sin_table(rope: RopeSpec, *, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return [num_positions, head_dim] float32: cosines in the first half of a row, sines in the second."""
    frequencies = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return radians a position for each pair of dimensions, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.llama3 is not None:
        return _scale_like_llama3(frequencies, rope.llama3)
    return frequencies / rope.linear_factor


def _scale_like_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    slow = frequencies / scaling.factor
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(slow, frequencies, smooth.clamp(0, 1))
