"""Matrices in GGUF's blocks, kept in 4-bit and 8-bit groups. N rows, K inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.formats.dense import DENSE
from engine.formats.groups import declare_group_experts, declare_groups
from engine.formats.product import ExpertsSpec, KeptWhole, Linear, LinearSpec
from engine.formats.stored import StoredPart
from engine.kernels.quantised.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS, decoded
from engine.kernels.quantised.groups import Groups
from engine.kernels.quantised.repack import Unpacked
from engine.kernels.quantised.slabs import Slabs
from engine.kernels.quantised.tiles import Tiles
from engine.weights.parameters import Weights


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """The bytes of whole blocks as `weight`. Quantised values and groups stay; scales and minimums become float16.

    MXFP4's are exponents of 2, which nothing rounds.
    """

    has_zeros = has_levels = has_order = False

    kind: str  # "Q4_K", a key of `KEPT`
    columns: tuple[int, int, int] | None = None  # their order in the file, see `StoredTensor`

    @property
    def bits(self) -> int:
        return KEPT[self.kind].bits

    @property
    def has_minimums(self) -> bool:
        return KEPT[self.kind].has_minimums

    @property
    def is_e2m1(self) -> bool:
        return self.kind == "MXFP4"

    @property
    def scales(self) -> torch.dtype:
        return torch.bfloat16 if self.is_e2m1 else torch.float32

    def group_of(self, inputs: int) -> int:
        return KEPT[self.kind].group

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        length = inputs // BLOCK_ELEMENTS[self.kind] * BLOCK_BYTES[self.kind]
        return {"weight": StoredPart((rows, length), torch.uint8)}

    def unused(self) -> tuple[str, ...]:
        return ()

    def plain(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        data = tensors["weight"]
        return self.as_ours(decoded(self.kind, data).values().view(len(data), -1))

    def unpacked(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        data = tensors["weight"]
        blocks, kept = decoded(self.kind, data), KEPT[self.kind]
        if self.is_e2m1:  # its decoder has twice the levels
            return Unpacked(blocks.codes.view(len(data), -1), (2 * blocks.scales).view(len(data), -1), None)
        middle = 0 if kept.has_minimums else 1 << (kept.bits - 1)
        minimums = None if blocks.minimums is None else self.as_ours(_rounded(blocks.minimums).view(len(data), -1))
        codes = self.as_ours((blocks.codes + (middle - blocks.zero)).view(len(data), -1))
        return Unpacked(codes, self.as_ours(_rounded(blocks.scales).view(len(data), -1)), None, minimums)

    def as_ours(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return numbers [N, K], or those of groups of columns, in our order."""
        if self.columns is None:
            return matrix
        groups, ratio, _ = self.columns
        return matrix.unflatten(1, (ratio, groups, -1)).transpose(1, 2).flatten(1)

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
        return declare_groups(self, spec, weights, under=under)

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor | Groups | Slabs | Tiles:
        return declare_group_experts(self, spec, weights, under=under)


@dataclass(frozen=True, slots=True)
class Kept:
    """A kind of GGUF blocks in our layout of groups."""

    bits: int
    group: int
    has_minimums: bool = False
    has_levels: bool = False  # tiles' of 4 bits


# The other kinds have non-uniform levels, or group sizes that the layout lacks.
KEPT = {
    "Q4_0": Kept(4, 32),
    "Q4_1": Kept(4, 32, has_minimums=True),
    "Q5_0": Kept(8, 32),
    "Q5_1": Kept(8, 32, has_minimums=True),
    "Q8_0": Kept(8, 32),
    "Q2_K": Kept(4, 16, has_minimums=True),
    "Q3_K": Kept(4, 16),
    "Q4_K": Kept(4, 32, has_minimums=True),
    "Q5_K": Kept(8, 32, has_minimums=True),
    "Q6_K": Kept(8, 16),
    "MXFP4": Kept(4, 32),
}


def _rounded(factors: torch.Tensor) -> torch.Tensor:
    """Round to float16 values that it can hold: products of a float16 and a few bits, half an ulp at most."""
    narrow = factors.half().float()
    return narrow if narrow.isfinite().all() else factors
