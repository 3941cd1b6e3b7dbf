"""Grouped-query attention (GQA) as plain values, one for each difference between models. Sizes are element counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.kernels.attention import HeadShape
from engine.kernels.codes import Kind, part_dims
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
    """The function from scores to attention weights."""

    scale: float | None = None  # multiplies scores; None: head_dim ** -0.5
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: no cap
    sinks: bool = False  # a learned logit for each head joins the softmax, without a value
    query_growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSpec:
    """Values, if they differ from keys in more than their matrix."""

    norm: bool = False  # RMSNorm without a weight over each head
    are_keys: bool = False  # values are the product from which keys are computed
    features: int = 0  # fewer than a key's, padded with zeros; 0: as many
    scale: float = 1.0  # multiplies them


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSpec:
    """The matrices around attention, and their names."""

    qkv_bias: bool = False
    output_bias: bool = False
    clip: float = 0.0  # queries, keys and values are clipped to it; 0: no clipping
    fused: str = ""  # the fused QKV module; "": one each
    output: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate:
    """A gate on attention's output, sigmoid by default."""

    module: str = ""  # "": its rows follow each query head's
    by_head: bool = False  # one gate a head, else one a feature
    activation: Literal["sigmoid", "softplus"] = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSharing:
    """Layers that attend to an earlier layer's keys and values, found by name."""

    lends: str = ""  # later layers attend to its keys and values
    borrows: str = ""  # it has none of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """The place of a rank's key and value heads among those of the whole model."""

    first: int = 0
    of: int = 0  # 0: there are no others


WHOLE = HeadShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (GQA): query heads share key and value heads in groups."""

    heads: HeadShape
    rope: RopeSpec | None  # None: no positional encoding
    window: int = 0  # sliding window in positions, see `first_seen`
    qk_norm: QkNorm | None = None
    scores: ScoreSpec = ScoreSpec()
    values: ValueSpec = ValueSpec()
    projections: ProjectionSpec = ProjectionSpec()
    gate: OutputGate | None = None
    sharing: KVSharing = KVSharing()
    codes: Kind | None = None  # the quantised type of keys and values; None: unquantised
    keeps: int = 0  # positions whose keys and values are kept; 0: all
    shared: HeadShare = WHOLE

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Keys and values, or their codes and the codes' scales."""
        if self.sharing.borrows:
            return ()
        heads = self.heads
        plain = Kept(
            planes=2,
            heads=heads.num_kv_heads,
            dim=heads.head_dim,
            window=self.keeps,
            first_head=self.shared.first,
            all_heads=self.shared.of,
        )
        if self.codes is None:
            return (plain,)
        return tuple(replace(plain, dim=dim, dtype=dtype) for dtype, dim in part_dims(self.codes, heads.head_dim))

    @property
    def q_size(self) -> int:
        return self.heads.num_heads * self.heads.head_dim

    @property
    def kv_size(self) -> int:
        return self.heads.num_kv_heads * self.heads.head_dim

    @property
    def has_fused_gate(self) -> bool:
        """True if the gate's rows follow each query head's."""
        return self.gate is not None and not self.gate.module

    @property
    def gate_size(self) -> int:
        """Rows of the output gate's own matrix."""
        if self.gate is None or not self.gate.module:
            return 0
        return self.heads.num_heads * (1 if self.gate.by_head else self.value_size)

    @property
    def value_size(self) -> int:
        """Features of a head's values in the checkpoint."""
        return self.values.features or self.heads.head_dim
