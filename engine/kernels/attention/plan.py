"""The positions that a pass attends to, and the division of its work: values on the device.

T tokens of S sequences in a row: decoding sequences (one new token each) first, then prompts or parts of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from engine.arrays import Integers

Positions = TypeVar("Positions", int, torch.Tensor, Integers)


def first_seen(position: Positions, window: int) -> Positions:
    """Return the first position attended to, which may be below 0.

    A `window` is so many positions, the own one included. 0: all. Negative: those of the own chunk, of -window positions.
    """
    if window < 0:
        return position - position % -window
    return position - window + 1 if window else position * 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A layer's function from scores to weights."""

    scale: float
    window: int = 0  # positions attended to, see `first_seen`
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: no cap
    sinks: torch.Tensor | None = None  # [Hq] float32: an additional logit for each head, without a value

    @property
    def are_plain(self) -> bool:
        return not self.softcap and self.sinks is None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer's attention. Layers of one shape share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KeptWindow:
    """The contents of one sliding-window layer, apart from the blocks of tokens."""

    number: int  # which block of an entry has it
    kept: torch.Tensor  # [num_blocks, planes, slots, heads, dim], a strided view of the pool


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences whose new tokens are contiguous."""

    # [S + 1] int32: first row of each sequence, and the end. In a slice of a batch the first may not be 0.
    query_start: torch.Tensor
    context_len: torch.Tensor  # [S] int32: positions in the pool, new tokens included
    block_table: torch.Tensor  # [S, most blocks] int32
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """A decode pass's work from `split.deal_out`. I items, S sequences, or rows of them that verify drafts."""

    items: torch.Tensor  # [I, 8] int32, columns as in `deal_out`
    parts: torch.Tensor  # [S, 2] int32: each one's first part, and number of items
    queries: int = 1  # most of an item, see `deal_out`


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prompts of a pass, or parts of them."""

    batch: AttentionBatch
    tiles: torch.Tensor  # [I, 8] int32, columns as in `split.deal_out_tiles`
    rows: int  # queries of a tile
    at_once: int  # the limit by which `deal_out_tiles` splits tiles
    blocks: torch.Tensor | None  # [I, 2] int32: contexts' block ids and positions; None: no context


@dataclass(frozen=True, slots=True)
class MadePlan:
    """Up-projected prompts at the end of a pass (MLA)."""

    first: int  # row of T of their first token
    prompts: PrefillPlan


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work of one pass's attention: `num_decode` single queries, drafted tokens' too, then prompts or parts of them.

    Prompts are in `prefill`, or behind those in `made`.
    """

    num_decode: int
    decode: AttentionBatch | None  # None in a captured graph, where the items are complete
    items: Mapping[int, DecodeItems]  # by window
    tables: torch.Tensor  # [...] int32: the items' table offsets count from its start
    prefill: PrefillPlan | None
    made: MadePlan | None = None  # only with MLA: the last prompts
