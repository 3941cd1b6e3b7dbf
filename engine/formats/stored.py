"""Formats described by a module's stored tensors: each can become a plain matrix while loading. N rows, K inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeVar

import torch

from engine.formats.dense import Dense, rows_of_each
from engine.formats.product import ExpertsSpec, Linear, LinearSpec, declare_bias
from engine.weights.parameters import Parameter, Placement, Shard, Way, Weights, stacked
from engine.weights.stage import Store

# Temporary bytes an element while a module is unpacked or dequantised: two of 32 bits, and some of 8.
TEMPORARY_BYTES = 10


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a module, as in the checkpoint."""

    shape: tuple[int, ...]  # dimensions of 1 are ignored
    dtype: torch.dtype  # other floats are converted to it, unless it has 8 bits
    names: tuple[str, ...] = ()  # accepted names; (): its kind


class Stored(Protocol):
    """A checkpoint's tensors of one module's matrix."""

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        """The tensors below the module's name."""
        ...

    def unused(self) -> tuple[str, ...]:
        """Optional tensors that aren't needed."""
        ...

    def plain(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Convert the tensors to the matrix [N, K], in any float dtype."""
        ...


StoredOf = Callable[[str], Stored]  # by our full name of the module
AnyStored = TypeVar("AnyStored", bound=Stored)


def stage_rows(
    spec: LinearSpec, take: Callable[[torch.Tensor, int], None], weights: Weights, *, under: str, temporary: int
) -> None:
    """Declare each tensor's plain rows until `take` has consumed them, with their first row in the share."""
    begin = 0
    for own in spec.by_tensor():

        def store(tensors: Mapping[str, torch.Tensor], begin: int = begin) -> None:
            take(tensors["weight"], begin)

        weights.staged({"weight": own}, store, under=under, temporary=temporary)
        begin += weights.share(own).shape[0]


def plain_linear(stored: Stored | StoredOf, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
    """Declare a product with the plain matrix."""
    dense = Dense(plain_matrix(stored, spec, weights, under=under), declare_bias(spec, weights, under=under))
    weights.when_loaded.append(dense.pack)
    return dense


def plain_matrix(stored: Stored | StoredOf, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
    """Declare the plain matrix [N, K] of a product's modules."""
    matrix = weights.empty(weights.share(spec.parameter("")).shape)
    formats = set[str]()
    for module, own in places_by_module(spec, weights).items():
        each, rows = of_module(stored, under + module), own[0].stored_shape[0]
        stage_module(each, module, (rows, spec.inputs), _Cut(each, matrix, own), weights, under=under)
        formats.add(type(each).__name__)
    weights.made_plain.update(formats)
    return matrix


def places_by_module(spec: LinearSpec, weights: Weights) -> dict[str, list[Placement]]:
    """Return the parts of each module's whole matrix, and their rows in this rank's share of the stack."""
    places: dict[str, list[Placement]] = {}
    for placement in weights.share(spec.parameter("")).placements:
        places.setdefault(placement.name.removesuffix("."), []).append(placement)
    return places


def of_module(stored: AnyStored | Callable[[str], AnyStored], module: str) -> AnyStored:
    """Return the stored tensors of a module, by our full name; modules may share some."""
    return stored(module) if callable(stored) else stored


def own_experts(stored: Stored | StoredOf, spec: ExpertsSpec, weights: Weights, *, under: str) -> range:
    """The experts of this rank. The checkpoint's tensors of others are not needed."""
    (placement,) = weights.share(spec.parameter()).placements
    own = range(placement.source[0].start, placement.source[0].stop)
    for expert in set(range(spec.num_experts)).difference(own):
        for module, rows in rows_of_each(spec, expert):
            each = of_module(stored, under + module)
            parts = each.tensors(rows.stop - rows.start, spec.inputs)
            names = chain.from_iterable(part.names or (kind,) for kind, part in parts.items())
            weights.unused.update(f"{under}{module}.{name}" for name in (*names, *each.unused()))
    return own


def plain_experts(stored: Stored | StoredOf, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor:
    """Declare the plain matrices [E, N, K] of a rank's experts, stored one by one."""
    if not spec.each:
        raise ValueError(
            f"quantised experts in one tensor ({under}{spec.together[0]}) are not supported in this format: take the model"
            " unquantised (--quantization fp8 or int8 makes it smaller while it is loaded), or its GGUF file"
        )
    matrices = weights.empty(weights.share(spec.parameter()).shape)
    formats = Counter[str]()
    for place in own_modules(stored, spec, weights, under=under):
        one = of_module(stored, under + place.name)
        stage_module(one, place.name, spec.size_of_each, _Cut(one, matrices, [place]), weights, under=under)
        formats[type(one).__name__] += 1
    weights.made_plain.update({name: count // len(spec.each) for name, count in formats.items()})
    return matrices


def own_modules(stored: Stored | StoredOf, spec: ExpertsSpec, weights: Weights, *, under: str) -> list[Placement]:
    """The modules of experts that this rank needs, each with its part and that part's place in the matrices."""
    if spec.shard is not Shard.EXPERTS:
        return list(weights.share(spec.parameter()).placements)
    whole = whole_module(*spec.size_of_each)
    return [
        replace(whole, name=module, target=(index, rows))
        for index, expert in enumerate(own_experts(stored, spec, weights, under=under))
        for module, rows in rows_of_each(spec, expert)
    ]


def whole_module(rows: int, inputs: int) -> Placement:
    """The place of a module's whole matrix."""
    return Placement("", (rows, inputs), (slice(0, rows), slice(0, inputs)), (slice(0, rows),))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Copies parts of a module's plain matrix into place."""

    stored: Stored
    matrix: torch.Tensor
    places: list[Placement]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        plain = self.stored.plain(tensors)
        for place in self.places:
            self.matrix[place.target].copy_(plain[place.source])


def stage_module(
    stored: Stored, module: str, size: tuple[int, int], take: Store, weights: Weights, *, under: str
) -> None:
    """Declare one module's whole tensors until they are consumed."""
    weights.unused.update(f"{under}{module}.{kind}" for kind in stored.unused())
    temporary = TEMPORARY_BYTES * size[0] * size[1]
    stage_parts(stored.tensors(*size), module, take, weights, under=under, temporary=temporary)


def naming(name: str, store: Store) -> Store:
    """The same, whose errors name what is stored."""

    def take(tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            store(tensors)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return take


def stage_parts(
    parts: Mapping[str, StoredPart], module: str, store: Store, weights: Weights, *, under: str, temporary: int = 0
) -> None:
    """Declare some whole tensors of a module until `store` has consumed them. Its errors then name the module."""
    take = naming(under + module, store)
    parameters, ways = dict[str, Parameter](), dict[str, list[Way]]()
    for kind, part in parts.items():
        named = [
            Parameter(shape=part.shape, parts=stacked({f"{module}.{name}": part.shape[0]}), format=part.dtype)
            for name in part.names or (kind,)
        ]
        parameters[kind], ways[kind] = named[0], [Way(parameter) for parameter in named]
    weights.staged(parameters, take, ways=ways, under=under, temporary=temporary)
