"""Contents kept by layers, and recurrent layers, as plain values. Sizes are element counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kernels.codes import KINDS
from engine.kernels.mamba import MambaHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A layer's array in each block of the pool, or in a state: [planes, slots, heads, dim], see `common.pages`."""

    planes: int
    heads: int
    dim: int
    dtype: str | None = None  # None: the compute dtype
    per_token: bool = True  # False: one state a sequence
    window: int = 0  # sliding window in positions; 0: all are kept
    first_head: int = 0  # first of these heads in the whole model
    all_heads: int = 0  # heads of the whole model; 0: as many as here

    @property
    def rank(self) -> tuple[bool, int, bool]:
        """Its position among a model's parts: contents of all tokens first, quantised ones before others."""
        return (not self.per_token, self.window, self.dtype not in _CODES)


_CODES = {dtypes[0] for dtypes in KINDS.values()}


# Rows of the projection: queries, keys and values together, or by key head, or in separate tensors; or all but strengths and
# decays, which are by key head.
Stored = Literal["by_kind", "by_group", "apart", "apart_but_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The gated delta rule after a short convolution, with an output gate. It has a recurrent state instead of a KV cache."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # numbers of a head
    value_dim: int
    taps: int  # inputs of the convolution, the token's own included
    stored: Stored = "by_kind"
    most_strength: float = 1.0
    norm_eps: float | None = None  # epsilon of the output's norm; None: the model's

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
    """The delta rule with per-channel decay (Kimi's KDA), after a short convolution, with an output gate."""

    num_heads: int
    head_dim: int  # size of keys and values
    taps: int  # inputs of the convolution, the token's own included

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The state, and the convolution's last inputs."""
        return (_state(self.num_heads, self.head_dim**2), _last_inputs(self.taps, 3 * self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba-2: a state that decays with each token's step size, after a short convolution, with an output gate."""

    heads: MambaHeads
    taps_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    multipliers: tuple[float, ...] = ()  # scales of gate, values, keys, queries, steps
    under: str = "mamba"

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The state, and the convolution's last inputs."""
        heads = self.heads
        state = _state(heads.num_heads, heads.state_size * heads.head_dim)
        return (state, _last_inputs(heads.taps, heads.channels.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSpec:
    """Mamba: each channel has its own state, with a decay for each element."""

    size: int  # channels
    state_size: int  # elements of a channel's state
    rank: int  # low rank of the step-size projection (dt_rank)
    taps: int  # inputs of the convolution, the token's own included
    taps_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The states, and the convolution's last inputs."""
        return (_state(self.size, self.state_size), _last_inputs(self.taps, self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionSpec:
    """A depthwise convolution over a few tokens, between two gates. It keeps its last inputs."""

    size: int
    taps: int  # tokens read, the own one included
    has_bias: bool = False

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (_last_inputs(self.taps, self.size),)


def _state(heads: int, dim: int) -> Kept:
    """A state of `dim` elements for each head, in float32: rounding errors would accumulate over the tokens."""
    return Kept(planes=1, heads=heads, dim=dim, dtype="float32", per_token=False)


def _last_inputs(taps: int, channels: int) -> Kept:
    """The inputs of a convolution before a token."""
    return Kept(planes=taps - 1, heads=1, dim=channels, per_token=False)
