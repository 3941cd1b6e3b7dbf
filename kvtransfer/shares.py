"""The shares of a handoff: what each rank of a sender writes into each rank of a receiver.

A rank keeps some heads of each part (`PagePart.kept`), and several ranks the same where there are more ranks than heads, or
latents; a stage keeps some layers of each. A receiving rank gets every byte of its blocks once: from the nearest sending rank
that keeps it. Padding behind the parts of an entry is set to zero, so that digests of whole blocks hold. Entries of further
groups may have other places, and take other numbers of blocks, at both ends.

Pure. Offsets are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from common.pages import LANE_BYTES, KVLayout, PagePart, entry_places
from kvtransfer.plan import Item, LayoutMismatchError, Runs, blocks_per_entry, differences

ZEROS = -1  # source of a run that has none


@dataclass(frozen=True, slots=True)
class Piece:
    """Runs from one block of a sender's entry to one of the receiver's."""

    source: int  # number of the block in its entry
    destination: int
    runs: tuple[Runs, ...]

    @property
    def num_bytes(self) -> int:
        return sum(run.count * run.num_bytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class Share:
    """The writes of one rank into one rank of the receiver, by group."""

    groups: tuple[tuple[Piece, ...], ...]
    is_whole: bool = False  # the blocks of both ends are equal: each moves as it is

    def __bool__(self) -> bool:
        return any(self.groups)

    def pieces(self, item: Item) -> list[Piece]:
        """The pieces that fill the receiver's block of an item."""
        return [piece for piece in self.groups[item.group] if piece.destination == item.number]


@dataclass(frozen=True, slots=True)
class Move:
    """One block of a receiver, and the sender's entry that fills it."""

    item: Item  # numbered as the receiver's
    block: int
    entry: tuple[int, ...]


def shares(sources: Sequence[KVLayout], destination: KVLayout, *, rank: int, ranks: int) -> list[Share]:
    """Return the share of each sending rank in the blocks of one receiving rank, `rank` of `ranks`.

    Raises LayoutMismatchError when the layouts differ in more than heads and layers, or nobody keeps one.
    """
    for source in sources:
        if reasons := differences(source, destination):
            raise LayoutMismatchError("the peer's KV layout differs: " + "; ".join(reasons))
    near = sorted(range(len(sources)), key=lambda one: (abs(one * ranks - rank * len(sources)), one))
    if sources[near[0]].compatible_with(destination):
        return [_whole(destination) if one == near[0] else Share(()) for one in range(len(sources))]
    groups = [_pieces(sources, destination, group, near) for group in range(1 + len(destination.groups))]
    return [Share(tuple(by_source[one] for by_source in groups)) for one in range(len(sources))]


def _whole(layout: KVLayout) -> Share:
    run = (Runs(source=0, destination=0, num_bytes=layout.block_bytes),)
    groups = tuple(tuple(Piece(at, at, run) for at in range(count)) for count in blocks_per_entry(layout))
    return Share(groups, is_whole=True)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part of a group, and for each layer the number of its block in an entry and its first byte there; rows of a layer."""

    part: PagePart
    at: list[tuple[int, int]]
    rows: int

    @property
    def row_bytes(self) -> int:
        return self.part.heads * self.part.head_bytes

    @property
    def layers(self) -> range:
        """Its layers' numbers among the model's."""
        return range(self.part.first_layer, self.part.first_layer + self.part.layers)

    def kept(self) -> Iterator[tuple[int, int, int]]:
        """First byte in the whole model's row, first byte in this one's, and number, of each run that is here."""
        starts = accumulate((size for _, size in self.part.kept), initial=0)
        for (first, size), start in zip(self.part.kept, starts, strict=False):
            yield first, start, size


def _placed(layout: KVLayout, group: int) -> list[_Placed]:
    size = layout.block_size
    parts = layout.groups[group - 1].parts if group else layout.pages
    if group:
        places = entry_places(parts, layout.block_bytes, size)
    else:
        starts = [sum(part.block_bytes(size) for part in parts[:index]) for index in range(len(parts))]
        places = [
            [(0, start + layer * part.block_bytes(size) // part.layers) for layer in range(part.layers)]
            for start, part in zip(starts, parts, strict=True)
        ]
    return [_Placed(part, at, part.planes * part.slots(size)) for part, at in zip(parts, places, strict=True)]


def _pieces(
    sources: Sequence[KVLayout], destination: KVLayout, group: int, near: Sequence[int]
) -> list[tuple[Piece, ...]]:
    """The pieces of one group, by source."""
    placed, target = [_placed(source, group) for source in sources], _placed(destination, group)
    found: list[dict[tuple[int, int], list[Runs]]] = [{} for _ in sources]
    for index, theirs in enumerate(target):
        parts = [its[index] for its in placed]
        for holders, layers in groupby(theirs.layers, key=lambda layer: _holders(parts, near, layer)):
            numbers = list(layers)
            for source, begin, there, size in _segments(parts, theirs, holders):
                ours = parts[source]
                for layer in numbers:
                    (number, first), (at, place) = (
                        ours.at[layer - ours.layers.start],
                        theirs.at[layer - theirs.layers.start],
                    )
                    run = _run(ours, theirs, source=first + begin, destination=place + there, size=size)
                    _append(found[source].setdefault((number, at), []), run)
    for at, gap in _gaps(destination, target, blocks_per_entry(destination)[group]):
        written = (runs for of in found for (_, number), runs in of.items() if number == at)
        owner = next(written, None)  # None: a block that other stages need
        (found[near[0]].setdefault((0, at), []) if owner is None else owner).append(gap)
    pieces = [tuple(Piece(*numbers, tuple(runs)) for numbers, runs in sorted(of.items())) for of in found]
    _check_lanes(pieces)
    return pieces


def _holders(parts: Sequence[_Placed], near: Sequence[int], layer: int) -> tuple[int, ...]:
    """The ranks that keep a layer, nearest first."""
    if holders := tuple(source for source in near if layer in parts[source].layers):
        return holders
    raise LayoutMismatchError(f"no rank keeps layer {layer}")


def _segments(ours: Sequence[_Placed], theirs: _Placed, near: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The runs of the receiver's row: source, first byte in its row and in the receiver's, number."""
    for first, start, size in theirs.kept():
        at = first
        while at < first + size:
            source, begin, left = _holder(ours, near, at)
            stop = min(first + size, at + left)
            yield source, begin, start + at - first, stop - at
            at = stop


def _holder(ours: Sequence[_Placed], near: Sequence[int], at: int) -> tuple[int, int, int]:
    """The nearest rank that keeps a byte of the whole model's row, its place in the rank's row, and bytes from there on."""
    for source in near:
        for first, start, size in ours[source].kept():
            if first <= at < first + size:
                return source, start + at - first, first + size - at
    raise LayoutMismatchError(f"no rank keeps head {at // ours[0].part.whole.head_bytes}")


def _run(ours: _Placed, theirs: _Placed, *, source: int, destination: int, size: int) -> Runs:
    """The runs of one layer."""
    if ours.row_bytes == theirs.row_bytes == size:
        return Runs(source=source, destination=destination, num_bytes=size * ours.rows)
    steps = {"source_step": ours.row_bytes, "destination_step": theirs.row_bytes}
    return Runs(source=source, destination=destination, num_bytes=size, count=ours.rows, **steps)


def _append(runs: list[Runs], run: Runs) -> None:
    """Add a layer's runs, joined with those before where they go on with the same steps."""
    if not runs or not _goes_on(runs[-1], run):
        runs.append(run)
    elif run.count == 1:
        runs[-1] = replace(runs[-1], num_bytes=runs[-1].num_bytes + run.num_bytes)
    else:
        runs[-1] = replace(runs[-1], count=runs[-1].count + run.count)


def _goes_on(before: Runs, after: Runs) -> bool:
    if before.count == after.count == 1:
        steps = (before.num_bytes, before.num_bytes)
    elif replace(before, source=0, destination=0, count=0) == replace(after, source=0, destination=0, count=0):
        steps = (before.count * before.source_step, before.count * before.destination_step)
    else:
        return False
    return (before.source + steps[0], before.destination + steps[1]) == (after.source, after.destination)


def _gaps(layout: KVLayout, placed: Sequence[_Placed], num_blocks: int) -> Iterator[tuple[int, Runs]]:
    """The padding of an entry's blocks, by number."""
    filled = sorted((*place, one.rows * one.row_bytes) for one in placed for place in one.at)
    for number in range(num_blocks):
        at = 0
        for _, first, size in [*(one for one in filled if one[0] == number), (number, layout.block_bytes, 0)]:
            if first > at:
                yield number, Runs(source=ZEROS, destination=at, num_bytes=first - at)
            at = first + size


def _check_lanes(pieces: Sequence[tuple[Piece, ...]]) -> None:
    for piece in (piece for of in pieces for piece in of):
        for run in piece.runs:
            offsets = (run.destination, run.num_bytes, run.source_step, run.destination_step)
            if any(offset % LANE_BYTES for offset in (*offsets, 0 if run.source == ZEROS else run.source)):
                raise LayoutMismatchError(f"shares of ranks are no multiples of {LANE_BYTES} bytes")
