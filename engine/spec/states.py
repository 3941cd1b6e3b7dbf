"""Contents that layers keep, and recurrent layers, as plain values. Sizes are element counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.kernels.codes import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A layer's array in each block of the pool, or in a state: [planes, slots, heads, dim], see `common.pages`."""

    planes: int
    heads: int
    dim: int
    dtype: str | None = None  # None: the one that the model computes in
    per_token: bool = True  # False: one state a sequence
    window: int = 0  # positions; 0: all are kept

    @property
    def rank(self) -> tuple[bool, int, bool]:
        """Where it comes among a model's: what is kept of all tokens first, codes before others."""
        return (not self.per_token, self.window, self.dtype not in _CODES)


_CODES = {dtypes[0] for dtypes in KINDS.values()}


# Rows of the inputs: queries, keys and values are together, those of each key head are, or all have tensors of their own;
# or all but strengths and decays, which each key head has together.
Stored = Literal["by_kind", "by_group", "apart", "apart_but_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The gated delta rule behind a short convolution, with an output gate. It keeps a state instead of keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # numbers of a head
    value_dim: int
    taps: int  # tokens that the convolution reads, the own one included
    stored: Stored = "by_kind"
    most_strength: float = 1.0
    norm_eps: float | None = None  # the output's norm has; None: the model's

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The state, and the convolution's last inputs."""
        channels = 2 * self.keys_size + self.values_size
        return (_state(self.num_value_heads, self.key_dim * self.value_dim), _last_inputs(self.taps, channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDeltaSpec:
    """The delta rule with a decay for each channel of a key, behind a short convolution, with an output gate: Kimi's."""

    num_heads: int
    head_dim: int  # keys' and values'
    taps: int  # tokens that the convolution reads, the own one included

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The state, and the convolution's last inputs."""
        return (_state(self.num_heads, self.head_dim**2), _last_inputs(self.taps, 3 * self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba-2: a state that decays by each token's step, behind a short convolution, with an output gate."""

    num_heads: int
    head_dim: int
    groups: int  # whose heads share B and C: keys and queries
    state_size: int  # numbers of a key
    taps: int  # tokens that the convolution reads, the own one included
    taps_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    shortest: float = 0.0  # a token's step is at least this
    longest: float = math.inf  # and at most this
    norm: Literal["before", "after", "none"] = "after"  # where RMSNorm is, of the gate
    norm_groups: int = 1  # parts that are normed each alone
    multipliers: tuple[float, ...] = ()  # multiply gate, values, keys, queries, steps
    under: str = "mamba"

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The state, and the convolution's last inputs."""
        channels = self.num_heads * self.head_dim + 2 * self.groups * self.state_size
        return (_state(self.num_heads, self.state_size * self.head_dim), _last_inputs(self.taps, channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSpec:
    """The first Mamba: each channel has a state of its own, with a decay for each number of it."""

    size: int  # channels
    state_size: int  # numbers of a channel's state
    rank: int  # features that a token's steps are made of
    taps: int  # tokens that the convolution reads, the own one included
    taps_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The states, and the convolution's last inputs."""
        return (_state(self.size, self.state_size), _last_inputs(self.taps, self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionSpec:
    """A convolution of each feature alone over a few tokens, between two gates. It keeps its last inputs."""

    size: int
    taps: int  # tokens that it reads, the own one included
    has_bias: bool = False

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (_last_inputs(self.taps, self.size),)


def _state(heads: int, dim: int) -> Kept:
    """`dim` numbers for each head. Rounding them to a small dtype would add up over the tokens."""
    return Kept(planes=1, heads=heads, dim=dim, dtype="float32", per_token=False)


def _last_inputs(taps: int, channels: int) -> Kept:
    """The inputs of a convolution before a token."""
    return Kept(planes=taps - 1, heads=1, dim=channels, per_token=False)
