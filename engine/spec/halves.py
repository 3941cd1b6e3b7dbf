"""Steps of a layer other than mixer and MLP as plain values: per-layer inputs, AltUp, LAuReL; and placeholder tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """Per-layer inputs: a row of a second table for the token, plus a projection of its embedding."""

    vocab_size: int  # rows of the table; later tokens use the first
    size: int
    activation: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Several residual streams. A layer predicts all of them, computes on one, and corrects all by its output.

    Its own input is added to all but the first.
    """

    num_streams: int
    active: int  # the stream that layers compute on
    scales_output: bool  # by a vector, where it gates a layer's own input


@dataclass(frozen=True, slots=True, kw_only=True)
class LaurelSpec:
    """A branch before the mixer: the mixer's input is added, with a normed low-rank projection of it."""

    rank: int
    before: str  # the norm whose output both read
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderSpec:
    """Placeholder tokens for images or sound, whose embeddings have another size and are normed and projected."""

    under: str  # prefix of the tensors' names
    first: int  # token id
    count: int  # tokens
    stored_rows: int
    size: int
    eps: float
