# mypy: allow-untyped-calls
"""Experts load from one tensor for each of their matrices, as the hub has them, or from one for all of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.checkpoint.encodings import encoding_of
from engine.checkpoint.safetensors import StoredTensor
from engine.families import read_model_spec
from engine.model.decoder import Decoder
from engine.weights import loader
from engine.weights.loader import CheckpointError, load_weights
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.experts import CASES
from tests.unit.engine.families.vision import CASES as WITH_VISION

EXPERT = "model.layers.0.mlp.experts.5.up_proj.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
(QWEN3_MOE,) = (case for case in CASES if case.name == "qwen3_moe")
(GRANITE_MOE,) = (case for case in CASES if case.name == "granitemoe")
(QWEN3_VL_MOE,) = (case for case in WITH_VISION if case.name == "qwen3_vl_moe")


def load(folder: Path) -> list[torch.Tensor]:
    """Every place of a tensor of the checkpoint, in whatever format it has it."""
    decoder = Decoder(read_model_spec(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, folder)
    return [places[0].tensor for _, places in sorted(decoder.weights.destinations.items())]


def in_memory_format(folder: Path) -> Path:
    """The same checkpoint with the names and shapes that transformers computes with."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = Path(shutil.copytree(folder, folder.with_name("in-memory")))
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, target / "model.safetensors")
    return target


# In memory transformers has rows for LongCat's experts that do nothing; nobody stores those.
# Of these it renames more than experts, or has no class for the text alone: nobody stores those names either.
RENAMED = ("mistral4", "axk1", "hy_v3")
IN_EITHER = [case for case in CASES if not case.fields.get("zero_expert_num") and case.name not in RENAMED]


@pytest.mark.parametrize("case", IN_EITHER, ids=[case.name for case in IN_EITHER])
def test_both_formats_give_the_same_weights(case: Case, tmp_path: Path) -> None:
    hub = case.build(tmp_path / "hub")
    ours, theirs = load(hub), load(in_memory_format(hub))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = QWEN3_MOE.build(tmp_path / "hub")
    weights = load_file(folder / "model.safetensors")
    del weights[EXPERT]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing weights {EXPERT}"):
        load(folder)


def test_experts_that_are_there_twice_are_named(tmp_path: Path) -> None:
    folder = QWEN3_MOE.build(tmp_path / "hub")
    fused = load_file(in_memory_format(folder) / "model.safetensors")[FUSED]
    save_file({FUSED: fused} | load_file(folder / "model.safetensors"), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=FUSED):
        load(folder)


def transposed(folder: Path, *endings: str) -> Path:
    """The same checkpoint with the experts' tensors of these names the other way around."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(endings):
            weights[name] = weights[name].transpose(1, 2).contiguous()
    target = Path(shutil.copytree(folder, folder.with_name("transposed")))
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize("size", [40, 32])
def test_experts_load_either_way_around(size: int, tmp_path: Path) -> None:
    """Of 32 the tensor of gates is square: the other tensor tells how it lies."""
    case = replace(QWEN3_VL_MOE, fields={**QWEN3_VL_MOE.fields, "moe_intermediate_size": size})
    folder = case.build(tmp_path / "hub")
    other = transposed(folder, "experts.gate_up_proj", "experts.down_proj")
    ours, theirs = load(folder), load(other)
    assert all(torch.equal(one, another) for one, another in zip(ours, theirs, strict=True))


def test_a_square_tensor_among_both_ways_is_refused(tmp_path: Path) -> None:
    case = replace(QWEN3_VL_MOE, fields={**QWEN3_VL_MOE.fields, "moe_intermediate_size": 32})
    folder = transposed(case.build(tmp_path / "hub"), "layers.0.mlp.experts.down_proj")
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*no tensor tells .*: store each expert.s matrices"):
        load(folder)


def test_quantised_experts_in_one_tensor_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = GRANITE_MOE.build(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"input_linear.weight\) are not supported .*: take the model unquantised .*GGUF"
    ):
        load(folder)


@pytest.mark.parametrize("columns", [1, 3, 8])
@pytest.mark.parametrize("limit", [16, 48, 1 << 20])
def test_a_tensor_in_another_order_is_placed_element_by_element(columns: int, limit: int, tmp_path: Path) -> None:
    """Pieces end within rows; the target's elements, taken row by row, are the file's."""
    stored = torch.randn(5, 7, columns)
    save_file({"x": stored}, tmp_path / "model.safetensors")
    share = torch.full((5, columns, 7), float("nan"))
    described = StoredTensor("x", "F32", (5, 7, columns), tmp_path / "model.safetensors", 0, stored.nbytes)
    encoding = encoding_of(described, torch.float32)
    run = loader._Run(described.file, 0, stored.nbytes, encoding, share.transpose(1, 2))
    buffer = stored.view(-1).view(torch.uint8)
    for at in range(0, stored.nbytes, limit):
        size = min(limit, stored.nbytes - at)
        loader._Part(run, at, size, at // 4).copy(buffer)
    assert torch.equal(share.transpose(1, 2), stored)
