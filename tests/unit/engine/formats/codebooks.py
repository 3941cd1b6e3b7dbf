"""Matrices as bitsandbytes writes them. N rows, K inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.unit.engine.formats.checkpoints import Store, Tensors

# Written by bitsandbytes 0.50.2: `nested` nf4 [129, 128], `floats` fp4 [32, 64], `rows` int8 [8, 64].
WRITTEN = Path(__file__).parent / "data" / "bitsandbytes.safetensors"
BLOCK, SCALES_BLOCK = 64, 256


def state_of(kind: str, **said: Any) -> torch.Tensor:
    said = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", **said}
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def codebook4(kind: str, *, nested: bool, **wrong: Any) -> Store:
    """`wrong`: what the state says otherwise."""
    written = load_file(WRITTEN)
    book = written["nested.weight.quant_map" if kind == "nf4" else "floats.weight.quant_map"].numpy()
    of_scales = written["nested.weight.nested_quant_map"].numpy()

    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.numpy().astype(np.float32).reshape(-1, BLOCK)
        scales = np.abs(blocks).max(1)
        parts, more = dict[str, Any](), {"shape": list(weight.shape)}
        if nested:
            mean = float(scales.mean())
            largest = np.array([np.abs(each - mean).max() for each in _cut(scales)], dtype=np.float32)
            relative = (scales - mean) / largest[np.arange(len(scales)) // SCALES_BLOCK]
            codes = np.abs(relative[:, None] - of_scales).argmin(1).astype(np.uint8)
            scales = of_scales[codes] * largest[np.arange(len(scales)) // SCALES_BLOCK] + np.float32(mean)
            parts = {"absmax": codes, "nested_absmax": largest, "nested_quant_map": of_scales}
            more |= {"nested_blocksize": SCALES_BLOCK, "nested_dtype": "float32", "nested_offset": mean}
        else:
            parts = {"absmax": scales}
        near = np.abs((blocks / scales[:, None])[..., None] - book).argmin(-1).reshape(-1, 2)
        stands_for = torch.from_numpy(book[near].reshape(-1, BLOCK) * scales[:, None]).view(weight.shape)
        tensors: Mapping[str, Any] = {f"weight.{name}": torch.from_numpy(part.copy()) for name, part in parts.items()}
        return {
            "weight": torch.from_numpy((near[:, 0] << 4 | near[:, 1]).astype(np.uint8)).view(-1, 1),
            "weight.quant_map": torch.from_numpy(book.copy()),
            f"weight.quant_state.bitsandbytes__{kind}": state_of(kind, **more | wrong),
            **tensors,
        }, stands_for

    return store


def rows_of_bytes(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return parts, codes.float() * (largest[:, None] / 127)


def _cut(scales: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [scales[begin : begin + SCALES_BLOCK] for begin in range(0, len(scales), SCALES_BLOCK)]
