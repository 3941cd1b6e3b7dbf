"""The plan of a handoff: its blocks in the order in which both ends number and push them, and the runs of bytes of each.

A sequence has entries in one or several groups of layers, each of some blocks, beside its blocks of tokens (`common.pages`).
They go in the order in which they become final: by blocks of tokens, and of one block by group. Entries that no token from
the prompt's end on reads stay where they are, and so does what the receiver has.

Pure. Parts are matched by their place in the layout. Workers of a model sharded by heads keep different heads; between
equal layouts a block is one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from common.pages import LANE_BYTES, KVLayout, PagePart
from common.words import Keeps

Lanes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CargoGroup:
    """One group's share of a cargo: entries from `first` on, of so many blocks each."""

    blocks: int = 1
    first: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One block that is pushed: its group, its entry there and its number in the entry."""

    group: int
    entry: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A prompt of `num_tokens` tokens. The first group is that of its blocks."""

    num_tokens: int
    block_size: int
    groups: Sequence[CargoGroup] = (CargoGroup(),)
    num_blocks: int = field(init=False)  # those of its tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_blocks", -(-self.num_tokens // self.block_size))

    def of_blocks(self, blocks_per_entry: Sequence[int]) -> Cargo:
        """The cargo in a receiver's blocks: its entries take as many of them, by group. The same for other groups than ours."""
        if len(blocks_per_entry) != len(self.groups):
            return self
        groups = [replace(group, blocks=count) for group, count in zip(self.groups, blocks_per_entry, strict=True)]
        return Cargo(num_tokens=self.num_tokens, block_size=self.block_size, groups=groups)

    def lacking(self, firsts: Sequence[int]) -> list[Item]:
        """The blocks that go to a receiver with all entries before these, by group."""
        begins = [max(first, group.first) for group, first in zip(self.groups, firsts, strict=True)]
        return [
            Item(number, entry, block)
            for entry in range(min(begins), self.num_blocks)
            for number, group in enumerate(self.groups)
            if entry >= begins[number]
            for block in range(group.blocks)
        ]

    def final_at(self, item: Item) -> int:
        """The number of computed tokens from which on a block is final."""
        return min((item.entry + 1) * self.block_size, self.num_tokens)

    def place(self, items: Sequence[Item], blocks: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """The entries that the blocks pushed for these items make, by group."""
        placed: list[dict[int, list[int]]] = [{} for _ in self.groups]
        for item, block in zip(items, blocks, strict=True):
            placed[item.group].setdefault(item.entry, []).append(block)
        return [[tuple(entry) for entry in entries.values()] for entries in placed]


def pick(items: Sequence[Item], tables: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """The blocks of these items, in a sequence's entries by group."""
    return [tables[item.group][item.entry][item.number] for item in items]


class LayoutMismatchError(ValueError):
    """Blocks can't move between two layouts. The message names every difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """`count` runs of `num_bytes`, with constant strides in the source's block and in the destination's."""

    source: int  # bytes from the block's start to the first run
    destination: int
    num_bytes: int
    count: int = 1
    source_step: int = 0  # stride between runs in bytes
    destination_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Adjacent heads of one part, counted from the worker's first head."""

    part: int
    source_head: int
    destination_head: int
    num_heads: int
    runs: Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The writes from one source into each block of one destination."""

    copies: tuple[Copy, ...]
    source_bytes: int  # size of a whole block
    destination_bytes: int

    @property
    def runs(self) -> tuple[Runs, ...]:
        """The copies' runs; runs adjacent at both ends are merged."""
        merged: list[Runs] = []
        for copy in self.copies:
            before = merged[-1] if merged else None
            if before is not None and _continues(before, copy.runs):
                merged[-1] = Runs(
                    source=before.source,
                    destination=before.destination,
                    num_bytes=before.num_bytes + copy.runs.num_bytes,
                )
            else:
                merged.append(copy.runs)
        return tuple(merged)

    @property
    def is_whole(self) -> bool:
        """True if a block moves whole, as one run at both ends."""
        whole = Runs(source=0, destination=0, num_bytes=self.source_bytes)
        return self.runs == (whole,) and self.source_bytes == self.destination_bytes

    def lanes(self) -> tuple[Lanes, Lanes]:
        """The 32-bit lanes that move: their indices in the source's block and in the destination's."""
        source = [lanes_at(run.source, run.source_step, run) for run in self.runs]
        destination = [lanes_at(run.destination, run.destination_step, run) for run in self.runs]
        return np.concatenate([*source, _NONE]), np.concatenate([*destination, _NONE])


_NONE = np.empty(0, np.int64)


def plan_copies(source: KVLayout, destination: KVLayout) -> Plan:
    """Return how `source` fills the heads of a block that both keep.

    Raises LayoutMismatchError when the layouts differ in more than heads, or have none in common.
    """
    if reasons := differences(source, destination):
        raise LayoutMismatchError("the peer's KV layout differs: " + "; ".join(reasons))
    copies = []
    for index, (ours, theirs) in enumerate(zip(source.pages, destination.pages, strict=True)):
        start = max(ours.first_head, theirs.first_head)
        end = min(ours.first_head + ours.heads, theirs.first_head + theirs.heads)
        layers = range(
            max(ours.first_layer, theirs.first_layer),
            min(ours.first_layer + ours.layers, theirs.first_layer + theirs.layers),
        )
        if start < end and layers:
            copies.append(_copy(source, destination, index, start, end, layers))
    if not copies:
        raise LayoutMismatchError(f"no head in common: {_heads(source)} here, {_heads(destination)} at the peer")
    return Plan(copies=tuple(copies), source_bytes=source.block_bytes, destination_bytes=destination.block_bytes)


def is_sharded(layout: KVLayout) -> bool:
    """True if a pool with this layout holds only some of the model's heads or layers."""
    return any(part.heads != part.all_heads or part.layers != part.all_layers for part in layout.pages)


@lru_cache(maxsize=8)
def lane_indices(layout: KVLayout) -> Lanes:
    """Return the index in the whole model's block of each 32-bit lane of this layout's block."""
    whole = msgspec.structs.replace(
        layout,
        parts=tuple(
            msgspec.structs.replace(part, heads=part.all_heads, first_head=0, layers=part.all_layers, first_layer=0)
            for part in layout.pages
        ),
    )
    return plan_copies(layout, whole).lanes()[1]


def differences(source: KVLayout, destination: KVLayout) -> list[str]:
    """Return every difference that keeps blocks from moving; nothing if only the heads differ."""
    if len(source.pages) != len(destination.pages):
        return [f"{len(source.pages)} parts here, {len(destination.pages)} at the peer"]
    found = []
    if source.block_size != destination.block_size:
        found.append(f"block_size is {source.block_size} here, {destination.block_size} at the peer")
    is_cut = source.is_cut or destination.is_cut
    ours_of, theirs_of = ([group.whole if is_cut else group for group in one.groups] for one in (source, destination))
    if ours_of != theirs_of:
        found.append(f"KV groups are {_groups(source)} here, {_groups(destination)} at the peer")
    for index, (ours, theirs) in enumerate(zip(source.pages, destination.pages, strict=True)):
        of_part = f" of part {index}" if len(source.pages) > 1 else ""
        for name in ("layers", "planes", "dim", "dtype", "per_token", "all_heads"):
            here, there = getattr(ours.whole, name), getattr(theirs.whole, name)
            if here != there:
                found.append(f"{name}{of_part} is {here} here, {there} at the peer")
        for part in (ours, theirs):
            found += _broken(part, of_part)
    return found


def _groups(layout: KVLayout) -> str:
    words = ["all in 1 block"]
    for group in layout.groups:
        keeps = "something unknown" if group.keeps is Keeps.OTHER else str(group.keeps)
        window = f" of {group.window}" if group.window else ""
        words.append(f"{keeps}{window} in {group.blocks_per_entry} blocks")
    return " + ".join(words)


def _broken(part: PagePart, of_part: str) -> list[str]:
    """Return why a part is invalid or can't be split by heads; "" if it is fine."""
    if not 0 <= part.first_head <= part.first_head + part.heads <= part.all_heads:
        return [f"heads{of_part} are {_span(part)} of {part.all_heads}"]
    if not 0 <= part.first_layer <= part.first_layer + part.layers <= part.all_layers:
        return [f"layers{of_part} are {part.layers} from {part.first_layer} on, of {part.all_layers}"]
    if part.channels and sum(count for _, count in part.channels) != part.dim:
        return [f"channels{of_part} are not {part.dim}"]
    if part.heads < part.all_heads and part.head_bytes % LANE_BYTES:
        return [f"a head{of_part} of {part.head_bytes} bytes is no multiple of {LANE_BYTES}, so it can't be sharded"]
    return []


def _copy(source: KVLayout, destination: KVLayout, index: int, start: int, end: int, layers: range) -> Copy:
    """The copy of the whole model's heads [start, end) of a part, in these of its layers."""
    ours, theirs = source.pages[index], destination.pages[index]
    size = destination.block_size
    offsets = [
        sum(each.block_bytes(size) for each in layout.pages[:index])
        + (layers.start - part.first_layer) * part.block_bytes(size) // part.layers
        + (start - part.first_head) * part.head_bytes
        for layout, part in ((source, ours), (destination, theirs))
    ]
    num_bytes, rows = (end - start) * theirs.head_bytes, theirs.rows(size) // theirs.layers * len(layers)
    if ours.heads == theirs.heads == end - start:
        runs = Runs(source=offsets[0], destination=offsets[1], num_bytes=rows * num_bytes)
    else:
        runs = Runs(
            source=offsets[0],
            destination=offsets[1],
            num_bytes=num_bytes,
            count=rows,
            source_step=ours.heads * ours.head_bytes,
            destination_step=theirs.heads * theirs.head_bytes,
        )
    heads = {"source_head": start - ours.first_head, "destination_head": start - theirs.first_head}
    return Copy(part=index, num_heads=end - start, runs=runs, **heads)


def _continues(before: Runs, after: Runs) -> bool:
    ends = (before.source + before.num_bytes, before.destination + before.num_bytes)
    return before.count == after.count == 1 and ends == (after.source, after.destination)


def lanes_at(start: int, step: int, run: Runs) -> Lanes:
    """The indices of a run's 32-bit lanes in its block, at one end: from byte `start` on, `step` apart."""
    if run.num_bytes % LANE_BYTES:
        raise ValueError(f"a run of {run.num_bytes} bytes is no multiple of {LANE_BYTES}")
    first = start // LANE_BYTES + np.arange(run.count)[:, None] * (step // LANE_BYTES)
    return (first + np.arange(run.num_bytes // LANE_BYTES)).reshape(-1)


def _heads(layout: KVLayout) -> str:
    layers = {(part.first_layer, part.layers) for part in layout.pages if part.layers < part.all_layers}
    of_some = ", ".join(f", layers {first}-{first + count - 1}" for first, count in sorted(layers))
    return "heads " + ", ".join(map(_span, layout.pages)) + of_some


def _span(part: PagePart) -> str:
    return f"{part.first_head}-{part.first_head + part.heads - 1}"


def blocks_per_entry(layout: KVLayout) -> list[int]:
    """Blocks of an entry, by group."""
    return [1, *(group.blocks_per_entry for group in layout.groups)]
