# mypy: allow-untyped-calls
"""Experts load from one tensor for all of them, or from one for each of their matrices, as the hub has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.model.decoder import Decoder
from engine.model.families import read_model_spec
from engine.weights import loader
from engine.weights.loader import CheckpointError, load_weights

EXPERT = "model.layers.0.mlp.experts.5.up_proj.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
FAMILIES = ("qwen3_moe",)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter, by the first name that a checkpoint may have for it."""
    decoder = Decoder(read_model_spec(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, folder)
    return {name: destination.tensor for name, destination in decoder.weights.destinations.items()}


@pytest.fixture
def hub_format(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """The tiny checkpoint of a family as transformers saves it: with the names of the hub."""

    def write(family: str) -> Path:
        folder = Path(shutil.copytree(tiny_model(family), tmp_path / family))
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder)
        return folder

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_give_the_same_weights(
    tiny_model: Callable[[str], Path], hub_format: Callable[[str], Path], family: str
) -> None:
    folder = hub_format(family)
    assert EXPERT in load_file(folder / "model.safetensors")
    ours, theirs = load(tiny_model(family)), load(folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_missing_expert_is_named(hub_format: Callable[[str], Path]) -> None:
    folder = hub_format("qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    del weights[EXPERT]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing weights {EXPERT}"):
        load(folder)


def test_experts_that_are_there_twice_are_named(
    tiny_model: Callable[[str], Path], hub_format: Callable[[str], Path]
) -> None:
    folder = hub_format("qwen3_moe")
    fused = load_file(tiny_model("qwen3_moe") / "model.safetensors")[FUSED]
    save_file({FUSED: fused} | load_file(folder / "model.safetensors"), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=FUSED):
        load(folder)


@pytest.mark.parametrize("columns", [1, 3, 8])
@pytest.mark.parametrize("limit", [16, 48, 1 << 20])
def test_a_tensor_in_another_order_is_placed_element_by_element(columns: int, limit: int, tmp_path: Path) -> None:
    """Pieces end within rows; the target's elements, taken row by row, are the file's."""
    stored = torch.randn(5, 7, columns)
    save_file({"x": stored}, tmp_path / "model.safetensors")
    share = torch.full((5, columns, 7), float("nan"))
    run = loader._Run(tmp_path / "model.safetensors", 0, stored.nbytes, torch.float32, share.transpose(1, 2))
    buffer = stored.view(-1).view(torch.uint8)
    for at in range(0, stored.nbytes, limit):
        size = min(limit, stored.nbytes - at)
        loader._Part(run, at, size, at // 4).copy(buffer)
    assert torch.equal(share.transpose(1, 2), stored)
