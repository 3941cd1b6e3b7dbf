"""Published checkpoints have tensors that nothing computes here: of layers that predict further tokens, of keys nobody reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.safetensors import CheckpointError
from tests.unit.engine.families import dense, experts, hybrids, vision
from tests.unit.engine.families.case import Case
from tests.unit.engine.formats.loading import loaded

CASES = {case.name: case for case in (*dense.CASES, *experts.CASES, *hybrids.CASES, *vision.CASES)}


def with_fields(case: Case, **fields: object) -> Case:
    return replace(case, fields={**case.fields, **fields})


KEYS = ("k_proj.weight", "k_proj.weight_scale", "v_proj.weight", "k_norm.weight")
LEFT = {
    "keys of a layer that borrows them": (CASES["gemma4-small"], [f"model.layers.5.self_attn.{key}" for key in KEYS]),
    "the same beside vision": (
        replace(CASES["gemma4-small"], text_in="Gemma4Config", outer=CASES["gemma4-vision"].outer),
        [f"model.language_model.layers.5.self_attn.{key}" for key in KEYS],
    ),
    "keys of Gemma 3n's layers that borrow them": (
        CASES["gemma3n"],
        [f"model.layers.6.self_attn.{key}" for key in KEYS],
    ),
    "the same beside other parts": (
        CASES["gemma3n beside vision"],
        [f"model.language_model.layers.6.self_attn.{key}" for key in KEYS],
    ),
    "GLM's layer for further tokens beside vision": (
        CASES["glm4v_moe"],
        [f"model.language_model.layers.3.{name}" for name in ("eh_proj.weight", "mlp.gate.weight")],
    ),
    "ERNIE's layers for further tokens": (
        CASES["ernie4_5_moe"],
        ["model.mtp_block.0.mlp.gate_proj.weight", "model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight"],
    ),
    "DeepSeek's layer for further tokens": (
        with_fields(CASES["deepseek_v3"], num_nextn_predict_layers=1),
        ["model.layers.3.eh_proj.weight", "model.layers.3.shared_head.head.weight"],
    ),
    "an indexer's of a layer that has none": (
        CASES["glm_moe_dsa"],
        [f"model.layers.1.self_attn.indexer.{name}" for name in ("wk.weight", "k_norm.bias", "weights_proj.weight")],
    ),
    "Qwen3.5's layer for further tokens": (CASES["qwen3_5"], ["mtp.fc.weight"]),
}


@pytest.mark.parametrize(("case", "names"), LEFT.values(), ids=LEFT)
def test_what_is_not_computed_is_left(case: Case, names: list[str], tmp_path: Path) -> None:
    folder = case.build(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert not tensors.keys() & set(names)
    save_file(tensors | {name: torch.ones(3, 3) for name in names}, file)
    loaded(folder)
    save_file(tensors | {names[0] + "_of_another_kind": torch.ones(3), "model.more.weight": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=r"unexpected weights model\.more\.weight"):
        loaded(folder)
