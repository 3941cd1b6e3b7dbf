"""Rotary embeddings, and their extension beyond the trained context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Rope scaling of Llama 3.1: long wavelengths are slowed down by `factor`, short ones kept, smoothly in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: frequencies below `beta_slow` turns over the original context are interpolated, with a ramp up to `beta_fast`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float  # multiplies cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp's ends are rounded to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """A divisor for each frequency; the long ones if sequences may exceed the original context."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float  # multiplies cosines and sines
    long_attention_factor: float | None = None  # used with the long divisors; None: the same

    def magnitude(self, num_positions: int) -> float:
        """Return the factor of cosines and sines if sequences may have so many positions."""
        if self.long_attention_factor is None or num_positions <= self.original_max_position_embeddings:
            return self.attention_factor
        return self.long_attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """The first `share` of the frequencies of the whole head; the others are not rotated."""

    share: float
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding."""

    theta: float
    scaling: Scaling | None = None
    share: float = 1.0  # leading part of a head that is rotated
    interleaved: bool = False  # neighbours are a pair; else dimensions half of the rotated part apart
    backwards: bool = False  # rotated by negative angles

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries are multiplied by `1 + scale * log(1 + floor((position + shift) / every))`."""

    scale: float
    every: int
    shift: int = 0
