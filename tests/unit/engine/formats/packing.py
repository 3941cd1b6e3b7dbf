"""Matrices in groups as AWQ, GPTQ, compressed-tensors, ModelOpt and gpt-oss write them. N rows, K inputs, G groups of a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.unit.engine.formats.checkpoints import Store, Tensors

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


@dataclass(frozen=True)
class Drawn:
    """Codes near a matrix, and what they stand for."""

    codes: np.ndarray[Any, Any]  # [N, K]
    scales: np.ndarray[Any, Any]  # [N, G]
    zeros: np.ndarray[Any, Any]  # [N, G]
    group_of: np.ndarray[Any, Any]  # [K]
    stands_for: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        values = (self.codes - self.zeros[:, self.group_of]) * self.scales[:, self.group_of].astype(np.float64)
        object.__setattr__(self, "stands_for", torch.from_numpy(values).float())


def near(
    weight: torch.Tensor, bits: int, group: int, *, zeros: bool = False, order: np.ndarray[Any, Any] | None = None
) -> Drawn:
    """`group` 0: all inputs. `order`: the group of input `order[i]` is that of place i."""
    matrix, (rows, inputs) = weight.double().numpy(), weight.shape
    num_groups = inputs // (group or inputs)
    group_of = np.empty(inputs, dtype=np.int64)
    group_of[np.arange(inputs) if order is None else order] = np.arange(inputs) // (group or inputs)
    highest = (1 << bits) - 1
    scales, lower = np.empty((rows, num_groups), dtype=np.float16), np.empty((rows, num_groups), dtype=np.int64)
    for index in range(num_groups):
        own = matrix[:, group_of == index]
        low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
        if zeros:
            scales[:, index] = (high - low) / highest
            lower[:, index] = np.clip(np.rint(-low / scales[:, index]), 0, highest)
        else:
            scales[:, index] = 2 * np.maximum(high, -low) / highest
            lower[:, index] = 1 << (bits - 1)
    codes = np.clip(np.rint(matrix / scales[:, group_of]) + lower[:, group_of], 0, highest).astype(np.int64)
    return Drawn(codes, scales, lower, group_of)


def words(codes: np.ndarray[Any, Any], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words of codes [..., n]; place i of a word has neighbour order[i]. Codes of 3 bits go on in the next word."""
    if 32 % bits:
        each = (codes[..., None] >> np.arange(bits)) & 1
        stream = np.packbits(each.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(stream.view(np.int32).copy())
    a_word = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, a_word).astype(np.uint64)
    packed = np.zeros(grouped.shape[:-1], dtype=np.uint64)
    for place, neighbour in enumerate(order or range(a_word)):
        packed |= grouped[..., neighbour] << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def awq(group: int) -> Store:
    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        drawn = near(weight, 4, group, zeros=True)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": words(drawn.codes.T, 4, order),
            "qzeros": words(drawn.zeros.T, 4, order),
            "scales": torch.from_numpy(drawn.scales.T.copy()),
        }
        return parts, drawn.stands_for

    return store


def gptq(bits: int, group: int, *, version: int = 1, zeros: bool = False, has_order: bool = False) -> Store:
    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        # Products that read the same inputs have one order.
        order = np.random.default_rng(inputs).permutation(inputs) if has_order else None
        drawn = near(weight, bits, group, zeros=zeros, order=order)
        stored = (drawn.zeros - (version == 1)) & ((1 << bits) - 1)
        parts = {
            "qweight": words(drawn.codes, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": torch.from_numpy(drawn.scales.T.copy()),
            "g_idx": torch.from_numpy(drawn.group_of).int(),
            "bias": torch.zeros(len(weight)),  # as AutoGPTQ does
        }
        return parts, drawn.stands_for

    return store


def packed_rows(bits: int, group: int, *, zeros: bool = False) -> Store:
    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        drawn = near(weight, bits, group, zeros=zeros)
        parts = {
            "weight_packed": words(drawn.codes, bits),
            "weight_scale": torch.from_numpy(drawn.scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            parts["weight_zero_point"] = words(drawn.zeros.T, bits).T
        return parts, drawn.stands_for

    return store


def signed_bytes(*, zeros: bool = False) -> Store:
    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        drawn = near(weight, 8, 0, zeros=zeros)
        parts = {
            "weight": torch.from_numpy(drawn.codes - 128).to(torch.int8),
            "weight_scale": torch.from_numpy(drawn.scales),
        }
        if zeros:
            parts["weight_zero_point"] = torch.from_numpy(drawn.zeros - 128).to(torch.int8)
        return parts, drawn.stands_for

    return store


def _fp4_codes(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The nearest codes, and what they are."""
    codes = np.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, np.abs(values))
    return codes + 8 * (values < 0), np.sign(values) * E2M1[codes]


def _pairs(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy((codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8))


def nvfp4(*, modelopt: bool) -> Store:
    """ModelOpt multiplies with the scale of the whole matrix, compressed-tensors divides by it."""

    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.double().unflatten(1, (-1, 16))
        largest = groups.abs().amax(2)
        whole = (largest.max() / 6 / 448).float()
        scale = (largest / 6 / whole.double()).to(torch.float8_e4m3fn)
        unit = (scale.double() * whole.double())[..., None]
        codes, values = _fp4_codes((groups / unit).flatten(1).numpy())
        stands_for = (torch.from_numpy(values).unflatten(1, (-1, 16)) * unit).flatten(1).float()
        pairs = _pairs(codes)
        if modelopt:
            return {
                "weight": pairs,
                "weight_scale": scale,
                "weight_scale_2": whole,
                "input_scale": 2 * whole,
            }, stands_for
        return {"weight_packed": pairs, "weight_scale": scale, "weight_global_scale": (1 / whole)[None]}, stands_for

    return store


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs uint8 [..., N, K / 2], exponents uint8 [..., N, K / 32], and what they stand for."""
    groups = weight.double().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=2.0**-120).log2().ceil()
    unit = torch.exp2(exponents)[..., None]
    codes, values = _fp4_codes((groups / unit).flatten(-2).numpy())
    stands_for = (torch.from_numpy(values).unflatten(-1, (-1, 32)) * unit).flatten(-2).float()
    return _pairs(codes), (exponents + 127).to(torch.uint8), stands_for


def mxfp4_rows(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    pairs, exponents, stands_for = mxfp4(weight)
    return {"weight_packed": pairs, "weight_scale": exponents}, stands_for
