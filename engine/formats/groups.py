"""Formats with 4-bit and 8-bit groups: modules are repacked into one layout as they arrive. N rows, K inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from engine.formats.dense import rows_of_each
from engine.formats.grouped import Grouped, TiledLinear, allocate_tiles, cut_within, serving, suits_tiles
from engine.formats.product import ExpertsSpec, KeptWhole, Linear, LinearSpec, declare_bias, own_of
from engine.formats.stored import (
    Stored,
    of_module,
    own_experts,
    own_modules,
    places_by_module,
    plain_experts,
    stage_module,
    whole_module,
)
from engine.kernels.device import use_triton
from engine.kernels.quantised import slabs, tiles
from engine.kernels.quantised.groups import Groups, allocate, pack, put, values
from engine.kernels.quantised.repack import Unpacked
from engine.kernels.quantised.slabs import Slabs
from engine.kernels.quantised.tiles import Tiles
from engine.weights.parameters import Placement, Shard, Weights

# A matrix whose largest scale loses more than this in float16 is refused.
_MOST_LOST = 2.0**-8


class Grouping(Stored, Protocol):
    """A checkpoint's tensors of one module's matrix in groups."""

    @property
    def bits(self) -> int: ...

    @property
    def has_zeros(self) -> bool: ...

    @property
    def has_minimums(self) -> bool: ...

    @property
    def is_e2m1(self) -> bool: ...

    @property
    def scales(self) -> torch.dtype:
        """Stores each scale unchanged."""
        ...

    @property
    def has_levels(self) -> bool: ...

    @property
    def has_order(self) -> bool:
        """Inputs are permuted, by a tensor of the checkpoint."""
        ...

    def group_of(self, inputs: int) -> int:
        """Inputs of a group of a row."""
        ...

    def unpacked(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        """Split a module's tensors."""
        ...


# Module name -> layout of its groups; all modules of a product share one.
GroupingOf = Callable[[str], Grouping]


def plain(format: Grouping, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a module's matrix [N, K] in float32."""
    found = format.unpacked(tensors)
    order, weight = found.order, _packed(format, found, format.group_of(found.codes.shape[1]))
    # The packed form is released, or a permuted matrix would be in memory twice.
    del found
    matrix = values(weight)
    return matrix if order is None else matrix[:, order.argsort()]


def declare_groups(
    format: Grouping | GroupingOf, spec: LinearSpec, weights: Weights, *, under: str
) -> Linear | KeptWhole:
    """Declare a product; a whole one where ranks' shares would end within groups or tiles, or have no order."""
    first, whole = of_module(format, under + spec.module(next(iter(spec.outputs)))), replace(spec, shard=Shard.NONE)
    share, shared = weights.share(spec.parameter("")), _Shared()
    # However many ranks there are, rows are rounded as one rounds them.
    is_tiled = weights.in_tiles and _suit_tiles(first, weights.share(whole.parameter("")).placements, spec.inputs)
    if not _is_cut_between(first, share.placements, spec.inputs, is_tiled=is_tiled):
        return own_of(declare_groups(format, whole, weights, under=under), spec, weights)
    by_module, shape = places_by_module(spec, weights), share.shape
    product = (
        TiledLinear(_tiles(first, shape, spec.inputs, weights))
        if is_tiled
        else Grouped(_allocate(first, shape, spec.inputs, weights.device))
    )
    shared.orders.update(dict.fromkeys(under + module for module in by_module))
    for module, places in by_module.items():
        own = of_module(format, under + module)
        take = _Rows(own, product.weight, places, shared, under + module)
        stage_module(own, module, (places[0].stored_shape[0], spec.inputs), take, weights, under=under)
    product.bias = declare_bias(spec, weights, under=under)
    weights.when_loaded.append(lambda: shared.agree(product))
    return serving(product, weights)


def _is_cut_between(format: Grouping, places: Sequence[Placement], inputs: int, *, is_tiled: bool) -> bool:
    """True if a rank's parts of modules have whole groups of the inputs, which have their place there, and whole tiles."""
    columns, group = places[0].source[-1], format.group_of(inputs)  # all have the same
    share = columns.stop - columns.start
    ends_groups = share == inputs or (not format.has_order and (group == inputs or share % group == 0))
    return ends_groups and (not is_tiled or _suit_tiles(format, places, inputs))


def _suit_tiles(format: Grouping, places: Iterable[Placement], inputs: int) -> bool:
    """True if tiles hold a format's codes and all parts of its modules."""
    group = format.group_of(inputs)
    is_whole = group in tiles.GROUPS or group == inputs or group % tiles.OF_ROWS == 0
    are_numbers = not (format.is_e2m1 or format.has_levels)
    return is_whole and are_numbers and all(suits_tiles(place, _tile_group(group)) for place in places)


def _tile_group(group: int) -> int:
    """The inputs of a tile's group: a larger one has its scale several times."""
    return min(group, tiles.OF_ROWS)


def _tiles(format: Grouping, shape: tuple[int, ...], inputs: int, weights: Weights) -> Tiles:
    has_minimums, group = format.has_zeros or format.has_minimums, _tile_group(format.group_of(inputs))
    return allocate_tiles(shape, weights, bits=format.bits, group=group, has_minimums=has_minimums)


def declare_group_experts(
    format: Grouping | GroupingOf, spec: ExpertsSpec, weights: Weights, *, under: str
) -> torch.Tensor | Groups | Slabs | Tiles:
    """Declare experts stored one by one. On a CPU whole numbers become tiles, MXFP4 stays at 4 bits, others become plain."""
    is_on_gpu = use_triton(weights.empty((1,)))
    is_whole = spec.shard is Shard.EXPERTS
    if spec.each and is_whole and not is_on_gpu and not callable(format) and _is_mxfp4(format, spec.inputs):
        return _in_slabs(format, spec, weights, under=under)
    if not spec.each or not (is_on_gpu or weights.in_tiles):
        return plain_experts(format, spec, weights, under=under)
    shape, shared = weights.share(spec.parameter()).shape, _Shared()
    places = own_modules(format, spec, weights, under=under)
    first = of_module(format, under + places[0].name)
    is_tiled = weights.in_tiles and _are_tiled(first, spec)
    if not is_tiled and not is_on_gpu:
        return plain_experts(format, spec, weights, under=under)
    if not _is_cut_between(first, places, spec.inputs, is_tiled=is_tiled):
        raise cut_within(under + places[0].name)
    together = (
        _tiles(first, shape, spec.inputs, weights) if is_tiled else _allocate(first, shape, spec.inputs, weights.device)
    )
    for place in places:
        index, rows, *_ = place.target
        assert isinstance(index, int)
        one = of_module(format, under + place.name)
        take = _Rows(one, together[index], [replace(place, target=(rows,))], shared, under + place.name)
        stage_module(one, place.name, spec.size_of_each, take, weights, under=under)
    weights.when_loaded.append(lambda: shared.fill(together))
    return together


def _are_tiled(format: Grouping, spec: ExpertsSpec) -> bool:
    return not format.has_order and _suit_tiles(format, [whole_module(*spec.size_of_each)], spec.inputs)


def _is_mxfp4(format: Grouping, inputs: int) -> bool:
    return format.is_e2m1 and format.scales == torch.bfloat16 and format.group_of(inputs) == slabs.GROUP


def _in_slabs(format: Grouping, spec: ExpertsSpec, weights: Weights, *, under: str) -> Slabs:
    own = own_experts(format, spec, weights, under=under)
    together = slabs.allocate((len(own), spec.rows, spec.inputs))
    for index, expert in enumerate(own):
        for module, rows in rows_of_each(spec, expert):
            take = _RowsOfSlabs(format, together[index], rows.start)
            stage_module(format, module, (rows.stop - rows.start, spec.inputs), take, weights, under=under)
    return together


def _allocate(format: Grouping, shape: tuple[int, ...], inputs: int, device: torch.device) -> Groups:
    """Allocate; `inputs`: of the whole matrix, of which this rank may have a share."""
    group = format.group_of(inputs)
    return allocate(
        shape,
        bits=format.bits,
        group=shape[-1] if group == inputs else group,
        device=device,
        has_zeros=format.has_zeros,
        has_minimums=format.has_minimums,
        has_levels=format.has_levels,
        is_e2m1=format.is_e2m1,
        scales=format.scales,
    )


def _packed(format: Grouping, found: Unpacked, group: int) -> Groups:
    return pack(
        found.codes,
        found.scales,
        bits=format.bits,
        group=group,
        zeros=found.zeros,
        minimums=found.minimums,
        is_e2m1=format.is_e2m1,
        levels=found.levels,
    )


@dataclass(frozen=True, slots=True)
class _Shared:
    """Facts that all modules of a matrix share, known once they are loaded.

    `orders`: in which inputs are read. Experts have none.
    """

    orders: dict[str, torch.Tensor | None] = field(default_factory=dict)
    levels: dict[str, torch.Tensor] = field(default_factory=dict)

    def agree(self, product: Grouped | TiledLinear) -> None:
        """Give a product the permutation of inputs shared by all its modules, and its levels."""
        self.fill(product.weight)
        first, *others = self.orders.values()
        for module, other in zip(list(self.orders)[1:], others, strict=True):
            if (first is None) != (other is None) or (first is not None and not torch.equal(first, _known(other))):
                raise ValueError(
                    f"{module}: its g_idx is not that of {next(iter(self.orders))}: such a desc_act is not supported"
                )
        product.order = first

    def fill(self, weight: Groups | Tiles) -> None:
        """Give a matrix its levels."""
        if isinstance(weight, Tiles) or weight.levels is None:
            return
        names = sorted(self.levels)
        each = torch.stack([self.levels[name] for name in names])
        for number in (each != each[0]).any(1).nonzero().flatten().tolist():
            raise ValueError(f"{names[number]}: its quant_map is not that of {names[0]}: store the model anew")
        weight.levels.copy_(each[0])


def _known(order: torch.Tensor | None) -> torch.Tensor:
    assert order is not None
    return order


@dataclass(frozen=True, slots=True)
class _RowsOfSlabs:
    """Packs the rows of one expert's module."""

    format: Grouping
    weight: Slabs
    begin: int

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = self.format.unpacked(tensors)
        slabs.put(self.weight, self.begin, found.codes, found.scales)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Packs parts of a module's matrix into their rows."""

    format: Grouping
    weight: Groups | Tiles
    places: list[Placement]
    shared: _Shared
    module: str

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = self.format.unpacked(tensors)
        inputs = found.codes.shape[1]
        group = self.format.group_of(inputs)
        if is_product := bool(self.shared.orders):
            self.shared.orders[self.module] = found.order
        if found.levels is not None:
            self.shared.levels[self.module] = found.levels
        for place in self.places:
            rows, columns = place.source
            begin, count = columns.start, columns.stop - columns.start
            if found.order is not None and not is_product:
                raise ValueError("desc_act is not supported for experts")
            of_groups = slice(begin // group, -(-columns.stop // group))
            own = Unpacked(
                found.codes[rows, columns],
                found.scales[rows, of_groups],
                None if found.zeros is None else found.zeros[rows, of_groups],
                None if found.minimums is None else found.minimums[rows, of_groups],
                levels=found.levels,
            )
            target = place.target[0]
            assert isinstance(target, slice)
            size = count if group == inputs else group
            if isinstance(self.weight, Tiles):
                _put_in_tiles(self.weight, target.start, own, size)
            else:
                put(self.weight, target.start, _packed(self.format, own, size))


def _put_in_tiles(weight: Tiles, begin: int, found: Unpacked, group: int) -> None:
    """Pack rows from row `begin` on. Raises ValueError for scales that float16 does not hold.

    Zeros become minimums in float16, which cost less than a hundredth of a step of the codes.
    """

    def of_tiles(factors: torch.Tensor) -> torch.Tensor:
        return factors.float().repeat_interleave(group // weight.group, dim=1)

    is_wide, scales = weight.bits == 8, found.scales.float()
    lost = (scales.half().float() - scales).abs().max()
    if not lost <= _MOST_LOST * scales.abs().max():
        raise ValueError("float16 does not hold its scales: load it with --dtype float32")
    codes = (found.codes.short() - 128).to(torch.int8) if is_wide else found.codes
    shift = 128 if is_wide else 0
    minimums = None
    if weight.has_minimums:
        lowest = found.minimums
        if lowest is None:
            zeros = 1 << (weight.bits - 1) if found.zeros is None else found.zeros.float()
            minimums = of_tiles(scales * (shift - zeros))
        else:
            minimums = of_tiles(lowest.float() + shift * scales)
    tiles.put(weight, begin, codes, of_tiles(scales), minimums)
