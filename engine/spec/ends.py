"""Norms and the two ends of a model as plain values: what is between token ids and layers, and between layers and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.spec.halves import LayerInputsSpec, PlaceholderSpec

NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]  # x * weight, x * (1 + weight), LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The kind of a model's norms."""

    kind: NormKind = "rms"
    eps: float = 1e-6
    has_weight: bool = True  # otherwise it is 1 everywhere, and absent from the checkpoint
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """The rows of the table on their way to the first layer."""

    multiplier: float = 1.0
    norm: str = ""  # by its tensor
    is_normed: bool = False  # with a norm without a weight
    placeholders: tuple[PlaceholderSpec, ...] = ()
    layer_inputs: LayerInputsSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The last norm, and the product with one output a token."""

    is_tied: bool = False  # it uses the embedding's table
    norm: str = "model.norm"
    norm_kind: NormKind | None = None  # None: as the others
    bias: bool = False
    multiplier: float = 1.0
    softcap: float = 0.0


RMS_NORMS, PLAIN_EMBEDDING, PLAIN_HEAD = NormSpec(), EmbeddingSpec(), HeadSpec()
