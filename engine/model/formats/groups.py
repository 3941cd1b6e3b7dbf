"""What formats with groups of 4 and 8 bits share: modules are packed into one layout as they arrive. N rows, K inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels.device import use_triton
from engine.kernels.quantised.groups import Groups, allocate, pack, put, values
from engine.kernels.quantised.repack import Unpacked
from engine.model.formats.dense import rows_of_each
from engine.model.formats.grouped import Grouped, serving
from engine.model.formats.product import ExpertsSpec, Linear, LinearSpec, declare_bias
from engine.model.formats.stored import Stored, own_experts, places_by_module, plain_experts, stage_module
from engine.model.parameters import Placement, Weights


class Grouping(Stored, Protocol):
    """What a checkpoint has of the matrix of one module in groups."""

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
        """Holds each scale as it is stored."""
        ...

    def group_of(self, inputs: int) -> int:
        """Inputs of a group of a row."""
        ...

    def unpacked(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        """Take a module's tensors apart."""
        ...


def plain(format: Grouping, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a module's matrix [N, K] in float32."""
    found = format.unpacked(tensors)
    matrix = values(_packed(format, found, format.group_of(found.codes.shape[1])))
    return matrix if found.order is None else matrix[:, found.order.argsort()]


def declare_groups(format: Grouping, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
    """Declare a product."""
    shape = weights.share(spec.parameter("")).shape
    grouped = Grouped(_allocate(format, shape, spec.inputs, weights.device))
    by_module = places_by_module(spec, weights)
    orders: dict[str, torch.Tensor | None] = {under + module: None for module in by_module}
    for module, places in by_module.items():
        take = _Rows(format, grouped.weight, places, orders, under + module)
        stage_module(format, module, (places[0].stored_shape[0], spec.inputs), take, weights, under=under)
    grouped.bias = declare_bias(spec, weights, under=under)
    weights.when_loaded.append(lambda: _agree(grouped, orders))
    return serving(grouped, weights)


def declare_group_experts(
    format: Grouping, spec: ExpertsSpec, weights: Weights, *, under: str
) -> torch.Tensor | Groups:
    """Declare experts that the checkpoint has one by one. On a CPU they become plain."""
    if not spec.each or not use_triton(weights.empty((1,))):
        return plain_experts(format, spec, weights, under=under)
    own = own_experts(format, spec, weights, under=under)
    together = _allocate(format, (len(own), spec.rows, spec.inputs), spec.inputs, weights.device)
    for index, expert in enumerate(own):
        for module, rows in rows_of_each(spec, expert):
            size = (rows.stop - rows.start, spec.inputs)
            place = Placement(module, size, (slice(0, size[0]), slice(0, size[1])), (rows,))
            take = _Rows(format, together[index], [place], None, under + module)
            stage_module(format, module, size, take, weights, under=under)
    return together


def _allocate(format: Grouping, shape: tuple[int, ...], inputs: int, device: torch.device) -> Groups:
    """`inputs`: of the whole matrix, of which this rank may have some."""
    group = format.group_of(inputs)
    return allocate(
        shape,
        bits=format.bits,
        group=shape[-1] if group == inputs else group,
        device=device,
        has_zeros=format.has_zeros,
        has_minimums=format.has_minimums,
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
    )


def _agree(grouped: Grouped, orders: Mapping[str, torch.Tensor | None]) -> None:
    """All modules of a product read its inputs in one order."""
    first, *others = orders.values()
    for module, other in zip(list(orders)[1:], others, strict=True):
        if (first is None) != (other is None) or (first is not None and not torch.equal(first, _known(other))):
            raise ValueError(
                f"{module}: its g_idx is not that of {next(iter(orders))}: such a desc_act is not supported"
            )
    grouped.order = first


def _known(order: torch.Tensor | None) -> torch.Tensor:
    assert order is not None
    return order


@dataclass(frozen=True, slots=True)
class _Rows:
    """Packs parts of a module's matrix into their rows."""

    format: Grouping
    weight: Groups
    places: list[Placement]
    orders: dict[str, torch.Tensor | None] | None  # by module
    module: str

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = self.format.unpacked(tensors)
        inputs = found.codes.shape[1]
        group = self.format.group_of(inputs)
        if self.orders is not None:
            self.orders[self.module] = found.order
        for place in self.places:
            rows, columns = place.source
            begin, count = columns.start, columns.stop - columns.start
            if found.order is not None and (self.orders is None or count != inputs):
                raise ValueError("desc_act is not supported for experts and for inputs that ranks share")
            if group != inputs and begin % group:
                raise ValueError(f"ranks can't share groups of {group} inputs")
            of_groups = slice(begin // group, -(-columns.stop // group))
            own = Unpacked(
                found.codes[rows, columns],
                found.scales[rows, of_groups],
                None if found.zeros is None else found.zeros[rows, of_groups],
                None if found.minimums is None else found.minimums[rows, of_groups],
            )
            target = place.target[0]
            assert isinstance(target, slice)
            put(self.weight, target.start, _packed(self.format, own, count if group == inputs else group))
