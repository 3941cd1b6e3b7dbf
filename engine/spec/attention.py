"""Grouped-query attention as plain values, one for each thing that differs between models. Sizes are element counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.kernels.attention import HeadShape
from engine.kernels.codes import KINDS, Kind
from engine.spec.scaling import QueryGrowth, RopeSpec
from engine.spec.states import Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """RMSNorm of queries and keys: of each head alone, or of all together; or LayerNorm of each, with weights of its own."""

    over: Literal["head", "all", "each"] = "head"
    has_weight: bool = True
    after_rope: bool = False
    q_name: str = "self_attn.q_norm"  # with `{}`: each head has a module
    k_name: str = "self_attn.k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSpec:
    """How scores become weights."""

    scale: float | None = None  # multiplies scores; None: head_dim ** -0.5
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay
    sinks: bool = False  # a learned score for each head joins the softmax, without a value
    query_growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSpec:
    """Values, where they differ from keys in more than their matrix."""

    norm: bool = False  # RMSNorm without a weight over each head
    are_keys: bool = False  # they are the product that keys are made of
    features: int = 0  # fewer than a key's, padded with zeros; 0: as many
    scale: float = 1.0  # multiplies them


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSpec:
    """The matrices around attention, and their names."""

    qkv_bias: bool = False
    output_bias: bool = False
    clip: float = 0.0  # queries, keys and values are cut off there; 0: they aren't
    fused: str = ""  # the module that holds queries', keys' and values' rows; "": one each
    output: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate:
    """A gate on attention's output, sigmoid by default."""

    module: str = ""  # "": its rows follow each query head's
    by_head: bool = False  # one gate a head, else one a feature
    activation: Literal["sigmoid", "softplus"] = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSharing:
    """Layers that attend to an earlier layer's keys and values, by a name."""

    lends: str = ""  # later layers attend to its keys and values
    borrows: str = ""  # it has none of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention whose query heads share key and value heads in groups."""

    heads: HeadShape
    rope: RopeSpec | None  # None: positions are not encoded
    window: int = 0  # positions attended to, see `first_seen`
    qk_norm: QkNorm | None = None
    scores: ScoreSpec = ScoreSpec()
    values: ValueSpec = ValueSpec()
    projections: ProjectionSpec = ProjectionSpec()
    gate: OutputGate | None = None
    sharing: KVSharing = KVSharing()
    codes: Kind | None = None  # the quantised form of keys and values; None: plain
    keeps: int = 0  # positions for which keys and values are kept; 0: all

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Keys and values, or their quantised values and those's scales."""
        if self.sharing.borrows:
            return ()
        heads = self.heads
        plain = Kept(planes=2, heads=heads.num_kv_heads, dim=heads.head_dim, window=self.keeps)
        if self.codes is None:
            return (plain,)
        sizes = zip(KINDS[self.codes], (heads.head_dim, 1), strict=False)
        return tuple(replace(plain, dim=dim, dtype=dtype) for dtype, dim in sizes)

    @property
    def q_size(self) -> int:
        return self.heads.num_heads * self.heads.head_dim

    @property
    def kv_size(self) -> int:
        return self.heads.num_kv_heads * self.heads.head_dim

    @property
    def has_fused_gate(self) -> bool:
        """Whether the gate's rows follow each query head's."""
        return self.gate is not None and not self.gate.module

    @property
    def gate_size(self) -> int:
        """Rows of the output gate's own matrix."""
        if self.gate is None or not self.gate.module:
            return 0
        return self.heads.num_heads * (1 if self.gate.by_head else self.value_size)

    @property
    def value_size(self) -> int:
        """Features that a head's values have in the checkpoint."""
        return self.values.features or self.heads.head_dim
