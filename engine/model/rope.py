"""The rotary table for every position, computed once in float32."""

from __future__ import annotations

import math

import torch

from engine.spec.model import UnsupportedModelError
from engine.spec.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryGrowth,
    RopeSpec,
    YarnScaling,
)


def cos_sin_table(rope: RopeSpec, *, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return [num_positions, rotated dimensions] float32: cosines in the first half of a row, sines in the second."""
    frequencies = inverse_frequencies(rope, head_dim, num_positions=num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    if rope.backwards:
        table[:, len(frequencies) :].neg_()
    if isinstance(rope.scaling, YarnScaling):
        table *= rope.scaling.attention_factor
    if isinstance(rope.scaling, LongRopeScaling):
        table *= rope.scaling.magnitude(num_positions)
    return table


def inverse_frequencies(rope: RopeSpec, head_dim: int, *, num_positions: int = 0) -> torch.Tensor:
    """Return radians a position for each rotary pair, float32.

    `num_positions`: of the longest sequence that may come, which LongRoPE depends on.
    """
    dim = rope.rotary_dim(head_dim)
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling():
            return _scale_like_llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _scale_like_yarn(frequencies, rope.scaling, rope.theta)
        case LongRopeScaling():
            is_long = num_positions > rope.scaling.original_max_position_embeddings
            divisors = rope.scaling.long_factor if is_long else rope.scaling.short_factor
            if len(divisors) != len(frequencies):
                raise UnsupportedModelError(
                    f"config.json: the rotation has {len(divisors)} factors (short_factor, long_factor, or a GGUF file's"
                    f" rope_freqs), and a head {len(frequencies)} pairs to rotate: each needs one"
                )
            return frequencies / torch.tensor(divisors)
        case ProportionalScaling(share=share, factor=factor):
            is_rotated = torch.arange(len(frequencies)) < int(share * dim // 2)
            return torch.where(is_rotated, frequencies / factor, 0.0)


def query_growth_table(growth: QueryGrowth, num_positions: int) -> torch.Tensor:
    """Return each position's scale of its query, [num_positions] float32."""
    steps = torch.floor((torch.arange(num_positions, dtype=torch.float32) + growth.shift) / growth.every)
    return 1 + growth.scale * torch.log1p(steps)


def _scale_like_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    slow = frequencies / scaling.factor
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(slow, frequencies, smooth.clamp(0, 1))


def _scale_like_yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """The interpolation of Peng et al., "YaRN" (2023)."""
    dim = 2 * len(frequencies)

    def dimension_of(turns: float) -> float:
        """The rotary pair with this many turns over the original context."""
        return dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    return torch.lerp(frequencies, frequencies / scaling.factor, ramp.clamp(0, 1))
