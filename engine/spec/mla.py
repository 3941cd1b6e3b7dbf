"""Multi-head latent attention (MLA) as plain values. Sizes are element counts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.attention import HeadShape
from engine.kernels.codes import Kind, part_dims
from engine.kernels.mla import MLAShape
from engine.spec.scaling import QueryGrowth, RopeSpec
from engine.spec.states import Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """The indexer of sparse attention: small queries and one small key a token, whose rotated part comes first."""

    num_heads: int
    dim: int  # size of a query's head and of the key
    interleaved: bool  # pairs are adjacent; both are rotated by the layer's rope

    @property
    def kept(self) -> Kept:
        return Kept(planes=1, heads=1, dim=self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSpec:
    """Sparse attention: a query attends to the positions that an indexer selects."""

    most: int  # positions that a query attends to
    indexer: IndexerSpec | None = None  # None: the layer before has selected them


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASizes:
    """The sizes of multi-head latent attention."""

    num_heads: int
    rank: int  # size of the latents (kv_lora_rank)
    query_rank: int  # size of the compressed query (q_lora_rank); 0: queries are not compressed
    plain: int  # features that are not rotated (qk_nope_head_dim)
    rotated: int  # qk_rope_head_dim
    value: int  # v_head_dim

    @property
    def query(self) -> int:
        return self.plain + self.rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention: heads share one compressed KV vector a token (latents), and one rotated key."""

    sizes: MLASizes
    rope: RopeSpec | None  # None: positions are not encoded
    scale: float
    latent_scale: float = 1.0  # multiplies the latents after their norm
    query_growth: QueryGrowth | None = None
    bias: bool = False
    window: int = 0
    by_head: bool = False  # each head's keys and values have tensors of their own
    codes: Kind | None = None  # the quantised type of the cached latents; rotated keys stay unquantised
    sparse: SparseSpec | None = None  # None: all positions are attended to

    @property
    def heads(self) -> HeadShape:
        """Heads of the absorbed queries."""
        return HeadShape(self.sizes.num_heads, 1, self.sizes.rank + self.sizes.rotated)

    def shape(self, itemsize: int) -> MLAShape:
        """The sizes, for elements of so many bytes."""
        return MLAShape(
            num_heads=self.sizes.num_heads,
            rank=self.sizes.rank,
            plain=self.sizes.plain,
            rotated=self.sizes.rotated,
            value=self.sizes.value,
            itemsize=itemsize,
            most=self.sparse.most if self.sparse else 0,
        )

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Latents and the rotated key; or codes, the key, and the codes' scales; then the indexer's key."""
        indexer = self.sparse.indexer if self.sparse else None
        indexer_keys = () if indexer is None else (indexer.kept,)
        if self.codes is None:
            return (Kept(planes=1, heads=1, dim=self.sizes.rank + self.sizes.rotated), *indexer_keys)
        codes, *scales = (
            Kept(planes=1, heads=1, dim=dim, dtype=dtype) for dtype, dim in part_dims(self.codes, self.sizes.rank)
        )
        return (codes, Kept(planes=1, heads=1, dim=self.sizes.rotated), *scales, *indexer_keys)
