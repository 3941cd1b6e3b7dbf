"""Weights as declarations: a parameter's tensors in the checkpoint, its sharding, its storage.

A layer declares its parameters to `Weights` as it is built and gets this rank's share of each, uninitialised. The loader then
asks `Weights` where each tensor goes.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from engine.weights.names import AS_OURS, StoredNames
from engine.weights.stage import Slot, Stage, Store

log = logging.getLogger("baton.engine")


class Shard(Enum):
    """The sharding of a parameter in a tensor-parallel group."""

    NONE = auto()  # replicated
    OUTPUTS = auto()  # some rows of every part: results are concatenated
    INPUTS = auto()  # some columns: results are summed (all-reduce)
    HEADS = auto()  # whole heads; with fewer heads than ranks, some are replicated
    EXPERTS = auto()  # some experts, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the checkpoint's tensors, and its rows in the parameter."""

    name: str
    rows: slice
    expert: int | None = None  # their expert, in a parameter of several
    stored: slice | None = None  # the part's rows of the tensor; None: all
    of: int = 0  # rows of the tensor, if it has more than these


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A weight of the whole model. Its parts are contiguous along the rows.

    Rows are the first dimension, or the second after the experts.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    shard: Shard = Shard.NONE
    unit: int = 1  # rows or columns that stay together, such as a head's
    format: torch.dtype | None = None  # None: the compute dtype


@dataclass(frozen=True, slots=True)
class Way:
    """A set of the checkpoint's tensors that hold a parameter."""

    parameter: Parameter
    # A view of the share whose elements, row by row, are in the stored tensor's order.
    seen: Callable[[torch.Tensor], torch.Tensor] = lambda share: share
    transposed: Way | None = None  # the same tensors, for the transposed shape


@dataclass(frozen=True, slots=True)
class Placement:
    """A part of a checkpoint's tensor, and its region in a rank's share."""

    name: str
    stored_shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a parameter."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of a checkpoint's tensor on this rank."""

    stored_shape: tuple[int, ...]
    source: tuple[slice, ...]  # the wanted part of it
    tensor: torch.Tensor  # a view of the share, or of the slot's plan
    slot: Slot | None = None  # it exists only while loading
    transposed: Destination | None = None  # the destination for the transposed shape


# One layer is stored while the next ones are read; experts' gate and up, and down, dominate.
LAYERS_AT_ONCE, STAGES_OF_A_LAYER = 3, 2


class Weights:
    """Allocates this rank's share of every parameter, and maps the checkpoint's tensors to it."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rank: int = 0,
        size: int = 1,
        stored: StoredNames = AS_OURS,
        most_elements: int | None = None,
    ) -> None:
        """`most_elements`: capacity of the checkpoint's files. A larger model is refused while it is built."""
        self.dtype, self.device, self.stored = dtype, device, stored
        self.destinations: dict[str, list[Destination]] = {}  # by the tensor's name
        self.ways: list[tuple[frozenset[str], ...]] = []  # each parameter: the tensors of every way to store it
        self.when_loaded: list[Callable[[], None]] = []
        # Matrices that don't keep their stored form, for the log: plain ones by format; decoded ones by kind of block.
        self.made_plain, self.decoded = Counter[str](), Counter[str]()
        self.differing = Counter[str]()  # whose values differ from the format's
        self.unused: set[str] = set()  # tensors that a checkpoint may have and the model does not need
        self.is_elsewhere: Callable[[str], bool] = lambda name: False  # True for tensors of other stages
        self.in_tiles = False  # groups become tiles
        self.rank, self._size = rank, size
        self._storing = threading.Lock()
        # Bytes of each stage, and temporary bytes for storing it.
        self._passing: list[tuple[int, int]] = []
        self._most_elements, self._elements = most_elements, 0

    def new(
        self, parameter: Parameter, *, ways: Sequence[Way] = (), under: str = "", default: float | None = None
    ) -> torch.Tensor:
        """Return the share of a parameter, whose parts' names in the checkpoint begin with `under`.

        With `ways`, a checkpoint has the tensors of one of them instead of the parameter's parts; with a `default` it may have
        none.
        """
        tensor = self.empty(self.share(parameter).shape, parameter.format)
        declared = tuple(self._declare(way, tensor, under) for way in ways or (Way(parameter),))
        if default is not None:
            tensor.fill_(default)
            declared = (*declared, frozenset())
        self.ways.append(declared)
        return tensor

    def staged(
        self,
        parameters: Mapping[str, Parameter],
        store: Store,
        *,
        ways: Mapping[str, Sequence[Way]] | None = None,
        under: str = "",
        temporary: int = 0,
    ) -> None:
        """Declare parameters that exist only while loading: `store` gets the shares of all of them, see `Stage`.

        `temporary`: bytes that it takes for a while, at most.
        """
        stage = Stage(store, self.device, self._storing)
        for kind, parameter in parameters.items():
            slot = stage.slot(kind, self.share(parameter).shape, parameter.format or self.dtype)
            own = (ways or {}).get(kind) or (Way(parameter),)
            self.ways.append(tuple(self._declare(way, slot.plan, under, slot) for way in own))
        self._passing.append((stage.num_bytes, temporary))

    @property
    def bytes_while_loading(self) -> int:
        """Approximate peak of temporary memory while weights are loaded."""
        largest = sorted((size for size, _ in self._passing), reverse=True)[:STAGES_OF_A_LAYER]
        return LAYERS_AT_ONCE * sum(largest) + max((temporary for _, temporary in self._passing), default=0)

    def tell_changes(self) -> None:
        """Log one line if not all matrices keep their stored format."""
        became = {"made_plain": self.made_plain, "decoded": +self.decoded, "differing": self.differing}
        if any(became.values()):
            counts = {name: dict(sorted(found.items())) for name, found in became.items() if found}
            dtype = str(self.dtype).removeprefix("torch.")
            log.warning("engine.weights_changed", extra=counts | {"dtype": dtype, "device": str(self.device)})

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for weights, uninitialised."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def share(self, parameter: Parameter) -> Share:
        """Return this rank's share of a parameter."""
        self._check_size(math.prod(parameter.shape), parameter)
        return share_of(parameter, self.rank, self._size)

    def own(self, parameter: Parameter) -> tuple[torch.Tensor, slice]:
        """Return the rows [N] and the columns of a matrix that are this rank's. It isn't one of experts."""
        placements = self.share(parameter).placements
        rows, columns = list[int](), slice(0, parameter.shape[1])
        for part, placement in zip(parameter.parts, placements, strict=True):
            own, columns = placement.source
            begin = part.rows.start - (0 if part.stored is None else part.stored.start)
            rows += range(begin + own.start, begin + own.stop)
        return torch.tensor(rows), columns

    def _check_size(self, elements: int, parameter: Parameter) -> None:
        if self._most_elements is not None and elements > self._most_elements:
            raise ValueError(
                f"{parameter.parts[0].name or 'a matrix'} of the shape {list(parameter.shape)}, by config.json or the metadata, "
                f"is more than the checkpoint's files can hold: is a size in there wrong, or the download incomplete?"
            )

    def settle(self) -> None:
        """Finish loading: let products repack their weights, and release leftovers."""
        self.destinations.clear()
        for prepare in self.when_loaded:
            prepare()
        self.when_loaded.clear()

    def _declare(self, way: Way, tensor: torch.Tensor, under: str, slot: Slot | None = None) -> frozenset[str]:
        """Register the destinations of one way's tensors; return their names."""
        self._elements += math.prod(way.parameter.shape)
        self._check_size(self._elements, way.parameter)
        placements = self.share(way.parameter).placements
        names = frozenset(under + placement.name for placement in placements)
        # Tensors of other ranks' experts are not read.
        self.unused |= {under + part.name for part in way.parameter.parts} - names
        if taken := names & self.destinations.keys():
            raise ValueError(f"two parameters are made of {', '.join(sorted(taken))}")
        for placement, place in zip(placements, self._places(way, tensor, slot), strict=True):
            self.destinations.setdefault(under + placement.name, []).append(place)
        return names

    def _places(self, way: Way, tensor: torch.Tensor, slot: Slot | None) -> list[Destination]:
        """The destination of each of the way's placements."""
        placements, seen = self.share(way.parameter).placements, way.seen(tensor)
        transposed = [None] * len(placements) if way.transposed is None else self._places(way.transposed, tensor, slot)
        return [
            Destination(each.stored_shape, each.source, seen[each.target], slot, other)
            for each, other in zip(placements, transposed, strict=True)
        ]


def whole(name: str, *shape: int) -> Parameter:
    """Return a replicated parameter that is one of the checkpoint's tensors."""
    return Parameter(shape=shape, parts=stacked({name: shape[0]}))


def of_experts(name: str, *shape: int, format: torch.dtype | None = None) -> Parameter:
    """Return a parameter that is one of the checkpoint's tensors, with an entry for each expert [E, ...]."""
    return replace(whole(name, *shape), shard=Shard.EXPERTS, format=format)


def stacked(rows: Mapping[str, int], *, expert: int | None = None) -> tuple[Part, ...]:
    """Return contiguous parts with these numbers of rows."""
    parts, begin = [], 0
    for name, count in rows.items():
        parts.append(Part(name=name, rows=slice(begin, begin + count), expert=expert))
        begin += count
    return tuple(parts)


def share_of(parameter: Parameter, rank: int, size: int) -> Share:
    """Shard a parameter for one of `size` ranks. Raises ValueError, naming a part, if it can't be split evenly."""
    num_experts = parameter.shape[0] if parameter.parts[0].expert is not None else 0
    parts, axis = parameter.parts, _CUT_AXIS[parameter.shard]
    if num_experts and parameter.shard is Shard.EXPERTS:
        mine = _kept(num_experts, parameter, rank, size)
        parts, axis, num_experts = _of_experts(parts, mine), None, mine.stop - mine.start
    placements, filled, lengths = list[Placement](), Counter[int | None](), list[int]()
    for part in parts:
        shape = (part.rows.stop - part.rows.start, *parameter.shape[2 if num_experts else 1 :])
        source = [slice(0, length) for length in shape]
        if axis is not None:
            source[axis] = _kept(shape[axis], parameter, rank, size)
        lengths = [each.stop - each.start for each in source]
        if part.stored is not None:
            source[0] = slice(part.stored.start + source[0].start, part.stored.start + source[0].stop)
        target: list[int | slice] = [slice(0, length) for length in lengths]
        target[0] = slice(filled[part.expert], filled[part.expert] + lengths[0])
        filled[part.expert] += lengths[0]
        if part.expert is not None:
            target.insert(0, part.expert)
        stored_shape = (part.of or shape[0], *shape[1:])
        placements.append(Placement(part.name, stored_shape, tuple(source), tuple(target)))
    experts = (num_experts,) if num_experts else ()
    return Share((*experts, max(filled.values()), *lengths[1:]), tuple(placements))


# The dimension along which ranks split a stored tensor. All experts may be in one tensor.
_CUT_AXIS = {Shard.NONE: None, Shard.OUTPUTS: 0, Shard.INPUTS: -1, Shard.HEADS: 0, Shard.EXPERTS: 0}


def _kept(length: int, parameter: Parameter, rank: int, size: int) -> slice:
    """One rank's slice of a dimension."""
    num_units, unit = length // parameter.unit, parameter.unit
    if num_units * unit == length and num_units % size == 0:
        count = length // size
        return slice(rank * count, (rank + 1) * count)
    if parameter.shard is Shard.HEADS and num_units * unit == length and size % num_units == 0:
        head = rank // (size // num_units)
        return slice(head * unit, (head + 1) * unit)
    name = parameter.parts[0].name
    raise ValueError(
        f"{name}: {size} ranks can't share {length} {parameter.shard.name.lower()} in units of {unit}: take another"
        " --tensor-parallel-size"
    )


def _of_experts(parts: tuple[Part, ...], experts: slice) -> tuple[Part, ...]:
    """The parts of these experts, renumbered from 0."""
    return tuple(
        replace(part, expert=part.expert - experts.start)
        for part in parts
        if part.expert is not None and experts.start <= part.expert < experts.stop
    )
