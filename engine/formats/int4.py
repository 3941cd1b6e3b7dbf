"""Online int4: plain matrices quantised to 4 bits in groups while loading. N rows, K inputs, G groups of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.formats.dense import DENSE, ways_of
from engine.formats.grouped import Grouped, TiledLinear, allocate_tiles, serving
from engine.formats.product import ExpertsSpec, KeptWhole, Linear, LinearSpec, declare_bias, kept_whole
from engine.formats.stored import stage_rows
from engine.kernels.device import use_triton
from engine.kernels.quantised import tiles
from engine.kernels.quantised.groups import GROUPS, Groups, allocate, pack, put
from engine.kernels.quantised.tiles import Tiles
from engine.weights.parameters import Shard, Weights

# Scales that are tried, of the number that is furthest from 0: codes down to -8 span its whole range, or a part of it.
_FACTORS = tuple(share / -8 for share in (1.0, 0.94, 0.88, 0.82, 0.76))
_ELEMENTS_AT_ONCE = 1 << 20  # fits into a core's cache
_ELEMENTS_AT_ONCE_ON_GPU = 1 << 23  # expanded to float32, several times
# Temporary bytes an element during quantisation.
_TEMPORARY_BYTES = 12


@dataclass(frozen=True, slots=True)
class Int4WhileLoading:
    """Groups of 128 inputs, or of the largest size that divides K, and of 32 in tiles; other matrices stay plain."""

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
        shape = weights.share(spec.parameter()).shape
        is_tiled = _suits_tiles(replace(spec, shard=Shard.NONE), weights)
        group = tiles.OF_ROWS if is_tiled else _group(spec.inputs)
        if not group:
            return DENSE.linear(spec, weights, under=under)
        if shape[1] % group or (is_tiled and not _suits_tiles(spec, weights)):
            return kept_whole(self, spec, weights, under=under)
        matrix = _tiles(shape, weights) if is_tiled else allocate(shape, bits=4, group=group, device=weights.device)
        temporary = _TEMPORARY_BYTES * _elements_at_once(weights.device)
        stage_rows(spec, _Take(matrix, group), weights, under=under, temporary=temporary)
        bias = declare_bias(spec, weights, under=under)
        return serving(TiledLinear(matrix, bias) if isinstance(matrix, Tiles) else Grouped(matrix, bias), weights)

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor | Groups | Tiles:
        """Experts are quantised on GPUs and in tiles: else each use on a CPU would dequantise them."""
        shape = weights.share(spec.parameter()).shape
        is_tiled = _suit_tiles(shape[1:], weights)
        group = tiles.OF_ROWS if is_tiled else _group(spec.inputs)
        if not group or spec.shard is not Shard.EXPERTS:
            return DENSE.experts(spec, weights, under=under)
        if not is_tiled and not use_triton(weights.empty((1,))):
            weights.differing["experts left plain"] += spec.num_experts
            return DENSE.experts(spec, weights, under=under)
        experts = (
            _tiles(shape, weights)
            if is_tiled
            else allocate(shape, bits=4, group=group, device=weights.device, scales=torch.float16)
        )

        def take(tensors: Mapping[str, torch.Tensor]) -> None:
            for expert, matrix in enumerate(tensors["weight"]):
                _Take(experts[expert], group)(matrix, 0)

        temporary = _TEMPORARY_BYTES * _elements_at_once(weights.device)
        ways = {"weight": ways_of(spec)}
        weights.staged({"weight": spec.parameter()}, take, ways=ways, under=under, temporary=temporary)
        return experts


INT4_WHILE_LOADING = Int4WhileLoading()


@dataclass(frozen=True, slots=True)
class _Take:
    """Quantises plain rows and stores them."""

    matrix: Groups | Tiles
    group: int

    def __call__(self, rows: torch.Tensor, begin: int) -> None:
        step = max(1, _elements_at_once(rows.device) // rows.shape[1] // tiles.OUTPUTS) * tiles.OUTPUTS
        for at in range(0, len(rows), step):
            if isinstance(self.matrix, Tiles):
                tiles.put_rounded(self.matrix, begin + at, rows[at : at + step], _FACTORS)
            else:
                codes, scales = quantise_groups(rows[at : at + step], self.group)
                put(self.matrix, begin + at, pack(codes, scales, bits=4, group=self.group))


def _suits_tiles(spec: LinearSpec, weights: Weights) -> bool:
    """True if tiles hold a product, or this rank's share of it."""
    shares = [weights.share(own).shape for own in spec.by_tensor()]
    return all(_suit_tiles(shape, weights) for shape in shares)


def _suit_tiles(shape: tuple[int, ...], weights: Weights) -> bool:
    return weights.in_tiles and tiles.suit(shape[-2], shape[-1], tiles.OF_ROWS)


def _tiles(shape: tuple[int, ...], weights: Weights) -> Tiles:
    return allocate_tiles(shape, weights, bits=4, group=tiles.OF_ROWS, has_minimums=False)


def _elements_at_once(device: torch.device) -> int:
    return _ELEMENTS_AT_ONCE_ON_GPU if device.type == "cuda" else _ELEMENTS_AT_ONCE


def _group(inputs: int) -> int:
    return next((size for size in sorted(GROUPS, reverse=True) if inputs % size == 0), 0)


def quantise_groups(matrix: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [N, K] and scales [N, G] float16 such that `(code - 8) * scale` approximates the matrix.

    The element that is furthest from 0 gets the code -8, or is cut off where a smaller scale leaves a smaller sum of squares.
    """
    values = matrix.float().unflatten(1, (-1, group))
    furthest = values.gather(2, values.abs().argmax(dim=2, keepdim=True))
    best = scales = torch.empty(0)
    for factor in _FACTORS:
        scale = (furthest * factor).half().float()
        error = (_rounded(values, scale).mul_(scale).sub_(values)).square_().sum(dim=2, keepdim=True)
        if factor == _FACTORS[0]:
            best, scales = error, scale
        else:
            scales = torch.where(error < best, scale, scales)
            best = torch.minimum(error, best)
    codes = _rounded(values, scales).add_(8)
    return codes.to(torch.uint8).flatten(1), scales.squeeze(2).half()


def _rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale.where(scale != 0, 1.0)).round_().clamp_(-8, 7)
