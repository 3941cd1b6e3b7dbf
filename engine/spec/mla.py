"""Multi-head latent attention (MLA) as plain values. Sizes are element counts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.attention import HeadShape
from engine.kernels.codes import KINDS, Kind
from engine.kernels.mla import MLAShape
from engine.spec.scaling import QueryGrowth, RopeSpec
from engine.spec.states import Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """The indexer of sparse attention: small queries and one small key a token, whose rotated part comes first."""

    num_heads: int
    dim: int  # size of a query's head and of the key
    interleaved: bool  # how both are rotated, by the angles of the layer's own heads

    @property
    def kept(self) -> Kept:
        return Kept(planes=1, heads=1, dim=self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention: heads share one compressed KV vector a token (latents), and one rotated key."""

    num_heads: int
    rank: int  # size of the latents (kv_lora_rank)
    query_rank: int  # size of the compressed query (q_lora_rank); 0: queries are not compressed
    plain_dim: int  # features that are not rotated (qk_nope_head_dim)
    rotated_dim: int  # qk_rope_head_dim
    value_dim: int  # v_head_dim
    rope: RopeSpec | None  # None: positions are not encoded
    scale: float
    latent_scale: float = 1.0  # multiplies the latents after their norm
    query_growth: QueryGrowth | None = None
    bias: bool = False
    window: int = 0
    by_head: bool = False  # each head's keys and values have tensors of their own
    codes: Kind | None = None  # the quantised type of the cached latents; rotated keys stay unquantised
    most: int = 0  # positions that a query attends to (index_topk); 0: all
    indexer: IndexerSpec | None = None  # selects them; None: the preceding layer's selection is reused

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def heads(self) -> HeadShape:
        """Heads of the absorbed queries among the latents."""
        return HeadShape(self.num_heads, 1, self.rank + self.rotated_dim)

    def shape(self, itemsize: int) -> MLAShape:
        """The sizes, with numbers of so many bytes."""
        return MLAShape(
            num_heads=self.num_heads,
            rank=self.rank,
            plain=self.plain_dim,
            rotated=self.rotated_dim,
            value=self.value_dim,
            itemsize=itemsize,
            most=self.most,
        )

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Latents and the rotated key; or codes, the key, and the codes' scales. Last an indexer's key."""
        indexer_keys = () if self.indexer is None else (self.indexer.kept,)
        if self.codes is None:
            return (Kept(planes=1, heads=1, dim=self.rank + self.rotated_dim), *indexer_keys)
        codes, *scales = (
            Kept(planes=1, heads=1, dim=dim, dtype=dtype)
            for dtype, dim in zip(KINDS[self.codes], (self.rank, 1), strict=False)
        )
        return (codes, Kept(planes=1, heads=1, dim=self.rotated_dim), *scales, *indexer_keys)
