"""Matrices of 8-bit floats (e4m3) with scales for the tensor, for each row, or for blocks of both. N rows, K inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from engine.model.formats.dense import DENSE, Dense
from engine.model.formats.product import ExpertsSpec, Linear, LinearSpec, declare_bias
from engine.model.formats.stored import StoredPart, plain_experts, plain_linear, plain_matrix
from engine.model.parameters import Weights

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
_SCALE = ("weight_scale", "weight_scale_inv")  # both are factors


class Scales(Enum):
    """What one scale is for."""

    TENSOR = auto()
    ROW = auto()
    BLOCK = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """`weight` in e4m3, and a scale in floats: their product is the matrix.

    Scales of activations that the checkpoint may have are not used: each row of them gets its own.
    """

    scales: Scales
    block: tuple[int, int] = (128, 128)  # rows and inputs, of Scales.BLOCK

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        blocks = (-(-rows // self.block[0]), -(-inputs // self.block[1]))
        shape = {Scales.TENSOR: (1,), Scales.ROW: (rows,), Scales.BLOCK: blocks}[self.scales]
        return {"weight": StoredPart((rows, inputs), FP8), "scale": StoredPart(shape, torch.float32, _SCALE)}

    def unused(self) -> tuple[str, ...]:
        return ("input_scale", "activation_scale")

    def plain(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight, scale = tensors["weight"].float(), tensors["scale"]
        if self.scales is Scales.BLOCK:
            scale = scale.repeat_interleave(self.block[0], 0)[: weight.shape[0]]
            return weight.mul_(scale.repeat_interleave(self.block[1], 1)[:, : weight.shape[1]])
        return weight.mul_(scale[:, None])

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        return plain_linear(self, spec, weights, under=under)

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return plain_matrix(self, spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return plain_experts(self, spec, weights, under=under)


@dataclass(frozen=True, slots=True)
class Fp8WhileLoading:
    """Plain matrices that become e4m3 with a scale for each row."""

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        """Without products of 8-bit floats the matrix is only rounded."""
        dense = Dense(self._rounded(spec, weights, under=under), declare_bias(spec, weights, under=under))
        weights.when_loaded.append(dense.pack)
        return dense

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.experts(spec, weights, under=under)

    def _rounded(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        matrix, begin = weights.empty(weights.share(spec.parameter()).shape), 0
        for part in spec.parts("weight"):
            rows = part.rows.stop - part.rows.start
            own = replace(spec.parameter(), shape=(rows, spec.inputs), parts=(replace(part, rows=slice(0, rows)),))
            end = begin + weights.share(own).shape[0]

            def store(tensors: Mapping[str, torch.Tensor], place: torch.Tensor = matrix[begin:end]) -> None:
                weight, scale = quantise_rows(tensors["weight"])
                place.copy_(weight.float().mul_(scale[:, None]))

            weights.staged({"weight": own}, store, under=under)
            begin = end
        return matrix


FP8_WHILE_LOADING = Fp8WhileLoading()


def quantise_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 [N, K] and scales [N] float32, whose product is about the matrix."""
    wide = matrix.float()
    scale = wide.abs().amax(dim=1).clamp(min=1e-12) / LARGEST
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scale
