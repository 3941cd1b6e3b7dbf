"""Limits of chunks, and the sizes that a model's passes share."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.groups import Entry, Group
from engine.kernels.attention import HeadShape, Tiling
from engine.kernels.mla import Forms
from engine.passes import InvalidChunkError
from engine.sequence import Chunk
from engine.step.staging import NewestTokens


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """The tiling limits of one shape of heads."""

    heads: HeadShape
    windows: tuple[int, ...]  # distinct windows of its layers
    items_at_once: int  # decode items that run concurrently
    item_queries: int  # see `attention.item_queries`
    tiling: Tiling
    forms: Forms | None = None  # None: no MLA


class PagedGroup(NamedTuple):
    """A group with block tables: one for each block of its entries."""

    number: int
    group: Group
    first: int  # index of its first block table

    @property
    def tables(self) -> slice:
        return slice(self.first, self.first + self.group.blocks)


class InPlaceGroup(NamedTuple):
    """The group whose entries go on in place."""

    number: int
    blocks: int  # blocks of an entry


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The block tables of a pass: that of tokens first, then those of the pool's further paged groups."""

    groups: tuple[Group, ...]
    paged: tuple[PagedGroup, ...] = field(init=False)
    count: int = field(init=False)
    in_place: InPlaceGroup | None = field(init=False)

    def __post_init__(self) -> None:
        paged, count, in_place = list[PagedGroup](), 0, None
        for number, group in enumerate(self.groups):
            if group.grows:
                paged.append(PagedGroup(number, group, count))
                count += group.blocks
            else:
                in_place = InPlaceGroup(number, group.blocks)
        object.__setattr__(self, "paged", tuple(paged))
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "in_place", in_place)


@dataclass(frozen=True, slots=True)
class LastAttention:
    """Attention in the last layer, which a pass with prompts computes for the sampled rows only."""

    heads: HeadLimits
    window: int
    table: int = 0  # the block table that it reads


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a chunk, and of its attention's tiling."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int
    attention: tuple[HeadLimits, ...]
    last: LastAttention
    tables: GroupTables
    graph_context: int = 16384  # positions of prompts' contexts in a graph that also decodes

    @property
    def graph_blocks(self) -> int:
        return self.graph_context // self.block_size

    def place(self, chunk: Chunk) -> int:
        """Sort key of chunks in a pass: decoding ones, then prompts, then up-projected ones."""
        if chunk.decodes:
            return 0
        forms = (heads.forms for heads in self.attention)
        return 2 if any(each is not None and each.makes(chunk.num_tokens, chunk.end) for each in forms) else 1


def check(chunk: Chunk, newest: NewestTokens, limits: Limits) -> None:
    """Raise InvalidChunkError if a chunk contradicts its sequence or the limits.

    On a GPU, an id out of range would destroy the device's context.
    """
    sequence = chunk.sequence
    num_known, end = len(sequence.token_ids) + len(chunk.drafted), chunk.end
    pending = end == num_known + 1 and newest.row_of(sequence) is not None
    if chunk.num_tokens < 1 or chunk.start < 0 or end > num_known + pending:
        problem = f"a chunk of {chunk.num_tokens} at {chunk.start} of {num_known + pending} tokens"
    elif chunk.sample and end < num_known:
        problem = f"asked to sample at position {end} of {num_known} known tokens"
    elif end > limits.max_model_len:
        problem = f"{end} tokens, the model takes {limits.max_model_len}"
    elif not (problem := wrong_tables(chunk, limits.tables.groups)):
        return
    raise InvalidChunkError(f"request {sequence.request_id}: {problem}")


def wrong_tables(chunk: Chunk, groups: SequenceOf[Group]) -> str:
    """Problem of a chunk's tables; "" if they have all that its tokens read and write."""
    tables = chunk.sequence.tables
    if len(tables) != len(groups):
        return f"{len(tables)} tables for {len(groups)} KV groups"
    end = chunk.end
    for number, group in enumerate(groups):
        entries = tables[number].entries
        if end > len(entries) * group.block_size:
            what = f"entries of KV group {number}" if number else "blocks"
            return f"{len(entries)} {what} don't cover {end} positions"
        first = group.first_seen(chunk.start)
        if not entries[first]:  # entries go one after another
            return f"entry {first} of KV group {number} is gone, which the token at {chunk.start} reads"
        if group.grows:
            continue
        if (at := chunk.start // group.block_size) < tables[number].num_shared:
            return f"entry {at} of KV group {number} is others', too, and the token at {chunk.start} changes it"
        if (drafted := len(chunk.drafted)) > (behind := len(tables[number].behind)):
            return f"{behind} entries of KV group {number} for the states behind {drafted} drafted tokens"
    return ""


def check_entry(entry: Entry, group: InPlaceGroup, num_blocks: int) -> Entry:
    """Return an entry that goes on in place. Raises InvalidChunkError unless its blocks are as many as they should be."""
    if len(entry) != group.blocks or min(entry) < 0 or max(entry) >= num_blocks:
        raise InvalidChunkError(f"a state in blocks {entry}, not {group.blocks} in [0, {num_blocks})")
    return entry
