"""A GGUF file's matrices on a CPU, in the bits that they have there. N rows, K inputs, V tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from engine.formats.dense import DENSE, PLAIN_TABLES
from engine.formats.gguf import KEPT, GgufBlocks, Kept
from engine.formats.grouped import ROUNDED_IN_GROUPS, TiledLinear, cut_within, suits_tiles
from engine.formats.product import (
    ExpertsSpec,
    KeptWhole,
    Linear,
    LinearSpec,
    OwnOutputs,
    Table,
    declare_bias,
    kept_whole,
)
from engine.formats.stored import (
    TEMPORARY_BYTES,
    naming,
    own_modules,
    places_by_module,
    plain_experts,
    plain_linear,
    stage_module,
    whole_module,
)
from engine.kernels.embedding import InputTokens
from engine.kernels.quantised import tiles
from engine.kernels.quantised.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS, decoded
from engine.kernels.quantised.tiles import Tiles
from engine.weights.parameters import Parameter, Placement, Shard, Weights

# Levels of IQ1 to IQ3 are codes of 8 bits. MXFP4's scales may be too small for float16, so it is none of them.
KINDS = {
    **{name: kind for name, kind in KEPT.items() if name != "MXFP4"},
    "Q5_0": Kept(5, 32),
    **dict.fromkeys(("Q5_1", "Q5_K"), Kept(5, 32, has_minimums=True)),
    "Q6_K": Kept(6, 16),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), Kept(4, 32)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), Kept(4, 32, has_levels=True)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S"), Kept(8, 32)),
    **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S"), Kept(8, 16)),
}


@dataclass(frozen=True, slots=True)
class GgufTiles:
    """Blocks of a kind in `KINDS`: codes, scales and minimums stay, the latter in float16."""

    blocks: GgufBlocks

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
        by_module, whole = places_by_module(spec, weights), replace(spec, shard=Shard.NONE)
        if not self._suit(weights.share(whole.parameter("")).placements, spec.inputs):
            return plain_linear(self.blocks, spec, weights, under=under)
        if not self._suit(weights.share(spec.parameter("")).placements, spec.inputs):
            return kept_whole(self, spec, weights, under=under)
        weight = self._allocate(weights.share(spec.parameter("")).shape, weights)
        for module, places in by_module.items():
            take = _Rows(self.blocks, weight, places)
            stage_module(self.blocks, module, (places[0].stored_shape[0], spec.inputs), take, weights, under=under)
        linear = TiledLinear(weight, declare_bias(spec, weights, under=under))
        weights.when_loaded.append(linear.widen)
        return linear

    def _allocate(self, shape: tuple[int, ...], weights: Weights) -> Tiles:
        weights.differing[ROUNDED_IN_GROUPS] += 1
        return allocated(*shape, kind=self.blocks.kind, device=weights.device)

    def _suit(self, places: Iterable[Placement], inputs: int) -> bool:
        """True if tiles hold parts of modules of so many inputs, which are whole blocks."""
        kind = self.blocks.kind
        return not inputs % BLOCK_ELEMENTS[kind] and all(suits_tiles(place, KINDS[kind].group) for place in places)

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor | Tiles:
        """Experts stored one by one, whole or a rank's part of each."""
        places = own_modules(self.blocks, spec, weights, under=under)
        if not self._suit([whole_module(*spec.size_of_each)], spec.inputs):
            return plain_experts(self.blocks, spec, weights, under=under)
        if not self._suit(places, spec.inputs):
            raise cut_within(under + places[0].name)
        weight = self._allocate(weights.share(spec.parameter()).shape, weights)
        for place in places:
            index, rows, *_ = place.target
            assert isinstance(index, int)
            take = _Rows(self.blocks, weight[index], [replace(place, target=(rows,))])
            stage_module(self.blocks, place.name, spec.size_of_each, take, weights, under=under)
        return weight


@dataclass(frozen=True, slots=True)
class _Rows:
    """Packs parts of a module's matrix into their rows."""

    blocks: GgufBlocks
    weight: Tiles
    places: list[Placement]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if all(self._is_as_stored(place) for place in self.places):
            for place in self.places:
                rows, target = place.source[0], place.target[0]
                assert isinstance(target, slice)
                tiles.put_blocks(self.weight, target.start, self.blocks.kind, tensors["weight"][rows])
            return
        codes, scales, minimums = unpacked(self.blocks, tensors["weight"])
        for place in self.places:
            rows, columns = place.source
            of_groups = slice(columns.start // self.weight.group, columns.stop // self.weight.group)
            target = place.target[0]
            assert isinstance(target, slice)
            own = None if minimums is None else minimums[rows, of_groups]
            tiles.put(self.weight, target.start, codes[rows, columns], scales[rows, of_groups], own)

    def _is_as_stored(self, place: Placement) -> bool:
        """True if these are whole rows, in the file's order, of a kind that is packed without unpacking it."""
        is_whole = place.source[1] == slice(0, place.stored_shape[1])
        return is_whole and self.blocks.columns is None and self.blocks.kind in tiles.PACKED


@dataclass(slots=True)
class TiledTable:
    """An embedding in tiles, the last of which may have rows to spare, shared with a tied head."""

    blocks: GgufBlocks
    weight: Tiles
    tokens: int  # V
    dtype: torch.dtype  # its features are returned in it

    @property
    def _spare(self) -> int:
        return self.weight.outputs - self.tokens

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        stored = pad(tensors["weight"], (0, 0, 0, self._spare))
        if self.blocks.kind in tiles.PACKED:
            tiles.put_blocks(self.weight, 0, self.blocks.kind, stored)
        else:
            tiles.put(self.weight, 0, *unpacked(self.blocks, stored))

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        return self.weight.rows(tokens.ids()).to(self.dtype)

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        weights.differing[ROUNDED_IN_GROUPS] += 1
        linear = TiledLinear(self.weight, bias)
        weights.when_loaded.append(linear.widen)
        return OwnOutputs(linear, torch.arange(self.tokens)) if self._spare else linear


@dataclass(frozen=True, slots=True)
class TiledTables:
    """Tables in the file's blocks; others are plain."""

    kinds: tuple[tuple[str, str], ...]  # module, kind of its blocks

    def declare(self, parameter: Parameter, weights: Weights) -> Table:
        name = dict(self.kinds).get(parameter.parts[0].name.removesuffix(".weight"))
        rows, inputs = weights.share(parameter).shape
        whole_tiles = -(-rows // tiles.OUTPUTS) * tiles.OUTPUTS
        if name is None or len(parameter.parts) > 1 or not tiles.suit(whole_tiles, inputs, KINDS[name].group):
            return PLAIN_TABLES.declare(parameter, weights)
        weight = allocated(whole_tiles, inputs, kind=name, device=weights.device)
        table = TiledTable(GgufBlocks(name), weight, rows, weights.dtype)
        stored = inputs // BLOCK_ELEMENTS[name] * BLOCK_BYTES[name]
        raw = replace(parameter, shape=(parameter.shape[0], stored), format=torch.uint8)
        take = naming(raw.parts[0].name, table.take)
        weights.staged({"weight": raw}, take, temporary=TEMPORARY_BYTES * rows * inputs)
        return table


def allocated(*shape: int, kind: str, device: torch.device) -> Tiles:
    """Memory for a matrix [N, K] of a kind's blocks, or for one of each expert [E, N, K]."""
    own = KINDS[kind]
    return tiles.allocate(
        *shape,
        bits=own.bits,
        group=own.group,
        has_minimums=own.has_minimums,
        has_levels=own.has_levels,
        device=device,
    )


def unpacked(blocks: GgufBlocks, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes [N, K], scales and minimums [N, G] of a matrix's bytes [N, length], as `tiles.put` takes them."""
    kind, found, rows = KINDS[blocks.kind], decoded(blocks.kind, data), len(data)
    if kind.has_levels:
        codes = found.codes
    elif found.levels:
        codes = torch.tensor(found.levels, dtype=torch.int8)[found.codes.flatten().int()]
    else:
        shift = tiles.middle_of(kind.bits, has_minimums=kind.has_minimums) - found.zero
        codes = (found.codes.short() + shift).to(torch.int8 if kind.bits == 8 else torch.uint8)

    def of_groups(factors: torch.Tensor) -> torch.Tensor:
        wide = BLOCK_ELEMENTS[blocks.kind] // factors.shape[1] // kind.group
        return blocks.as_ours(factors.repeat_interleave(wide, dim=1).view(rows, -1))

    minimums = None if found.minimums is None else of_groups(found.minimums)
    return blocks.as_ours(codes.view(rows, -1)), of_groups(found.scales), minimums
