"""Additions to one residual stream: inputs of layers, further streams, a low rank beside the mixer, other tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """Each layer ends with an input of its own: a row that the token has in a second table, and a product of its embedding."""

    vocab_size: int  # rows of the table; a token behind them has the first
    size: int
    activation: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Several residual streams. A layer predicts all of them, computes on one, and corrects all by what came out.

    Its own input is added to all but the first.
    """

    num_streams: int
    active: int  # the one that layers compute on
    scales_output: bool  # by a vector, where it gates a layer's own input


@dataclass(frozen=True, slots=True, kw_only=True)
class LaurelSpec:
    """Before the mixer: what the mixer will read is added, and a normed product of it through few features."""

    rank: int
    before: str  # the norm that both read
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderSpec:
    """Tokens that stand for images or sound have embeddings of another size, which are normed and projected."""

    under: str  # beginning of the tensors' names
    first: int  # token id
    count: int  # tokens
    stored_rows: int
    size: int
    eps: float
