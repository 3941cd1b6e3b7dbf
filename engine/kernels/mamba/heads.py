"""The heads of a layer, and its projection's columns: the gate, the convolution's inputs, the steps (dt)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.kernels.delta.plan import Channels, Columns, Span

Norm = Literal["before", "after", "none"]  # position of the RMSNorm relative to the gate


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaHeads:
    """`num_heads` heads in `groups`; a group shares one key (B) and one query (C)."""

    num_heads: int
    head_dim: int  # features of a value (x)
    groups: int
    state_size: int  # features of a key (B), and of a query (C)
    taps: int  # inputs of the convolution, the token's own included
    shortest: float = 0.0  # lower bound of the step size (dt)
    longest: float = math.inf  # upper bound
    norm: Norm = "after"
    norm_groups: int = 1  # groups normed separately

    @property
    def size(self) -> int:
        """Features of all values."""
        return self.num_heads * self.head_dim

    @property
    def keys_size(self) -> int:
        return self.groups * self.state_size

    @property
    def heads_of_a_group(self) -> int:
        return self.num_heads // self.groups

    @property
    def channels(self) -> Channels:
        """The convolution's channels: values, keys and queries in sequence. The gate's columns precede them."""
        width = self.size + 2 * self.keys_size
        return Channels(
            spans=(Span(columns=Columns(first=self.size, step=width), groups=1, width=width),), taps=self.taps
        )

    @property
    def first_step(self) -> int:
        """The first column of the heads' steps."""
        return 2 * (self.size + self.keys_size)

    @property
    def num_columns(self) -> int:
        return self.first_step + self.num_heads
