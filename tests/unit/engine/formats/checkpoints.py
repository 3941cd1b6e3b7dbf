# mypy: allow-untyped-calls
"""Tiny checkpoints in quantised formats, and the plain ones that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.families import read_model_spec
from engine.spec.model import UnsupportedModelError

Tensors = Mapping[str, torch.Tensor]
# A module's name and matrix -> its tensors by their last names, and the matrix that they stand for.
Store = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def written(plain: Path, folder: Path, store: Store, config: Mapping[str, Any], *, keeps: tuple[str, ...] = ()) -> Path:
    """Write a checkpoint whose matrices are stored by `store` into `folder`, and what it stands for beside it as `-plain`.

    `keeps`: parts of the names of modules whose matrices stay as they are.
    """
    tensors = load_file(plain / "model.safetensors")
    quantised, same = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or weight.dim() != 2 or "embed" in name or any(part in name for part in keeps):
            continue
        parts, same[name] = store(module, weight)
        del quantised[name]
        quantised |= {f"{module}.{kind}": part.contiguous() for kind, part in parts.items()}
    for target, weights, extra in ((folder, quantised, config), (plain_of(folder), same, {})):
        shutil.copytree(plain, target)
        save_file({name: weight.contiguous() for name, weight in weights.items()}, target / "model.safetensors")
        fields = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**fields, **extra}))
    return folder


def plain_of(folder: Path) -> Path:
    """The unquantised checkpoint of the same values."""
    return folder.with_name(folder.name + "-plain")


def in_16_bits(folder: Path, dtype: torch.dtype) -> Path:
    """Round the float matrices of a checkpoint to a dtype of 16 bits, where they are. Returns the folder."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        is_plain = {name: each.dim() == 2 and each.dtype == torch.float32 for name, each in tensors.items()}
        save_file(
            {name: each.to(dtype) if is_plain[name] else each for name, each in tensors.items()},
            file,
            metadata={"format": "pt"},
        )
    return folder


def refused(config: Mapping[str, Any], message: str, plain: Path, folder: Path) -> None:
    """Check that nobody reads a model with this `quantization_config`, and what is said then. `folder` is empty."""
    fields = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_spec(folder)


def fp8_tensor(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / LARGEST
    stored = (weight / scale).to(FP8)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor([0.7])}, stored.float() * scale


def fp8_row(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(dim=1, keepdim=True) / LARGEST).to(torch.bfloat16)
    stored = (weight / scale.float()).clamp(-LARGEST, LARGEST).to(FP8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def fp8_block(rows: int, inputs: int, name: str = "weight_scale_inv") -> Store:
    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = (-(-weight.shape[0] // rows), -(-weight.shape[1] // inputs))
        scale = torch.empty(size)
        for row in range(size[0]):
            for column in range(size[1]):
                block = weight[row * rows : (row + 1) * rows, column * inputs : (column + 1) * inputs]
                scale[row, column] = block.abs().amax() / LARGEST
        wide = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(inputs, 1)[:, : weight.shape[1]]
        stored = (weight / wide).to(FP8)
        return {"weight": stored, name: scale}, stored.float() * wide

    return store


def compressed(strategy: str, *, ignore: tuple[str, ...] = (), **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of llm-compressor."""
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": strategy,
            "symmetric": True,
            "dynamic": False,
            **weights,
        },
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.3,
        "sparsity_config": {},
        "version": "0.13.0",
    }
    return {"quantization_config": config}
