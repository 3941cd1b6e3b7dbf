"""Models whose weights are drawn: every parameter is filled, and their floors are those of their cards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engine.floors import ModelCost
from benchmarks.weights.drawn import DRAWN, EMBEDDING, draw_weights, write_config
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import model_spec, read_model_spec
from tests.unit.benchmarks.tiny import tiny
from tests.unit.engine.insides import products_of

PARAMETERS = {  # as their cards say, of those with vision the text part
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-3-12b": 11_766_034_176,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-9b": 8_953_803_264,
    "glm-4.7-flash": 29_943_393_920,
}


def cost() -> ModelCost:
    return ModelCost.of(model_spec(DRAWN["qwen3-30b-a3b"]), "bfloat16")


@pytest.mark.parametrize(("shape", "parameters"), PARAMETERS.items())
def test_a_shape_has_as_many_parameters_as_its_card_says(shape: str, parameters: int) -> None:
    assert ModelCost.of(model_spec(DRAWN[shape]), "bfloat16").stored_parameters == parameters


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    one_layer = 128 * 3 * 2048 * 768 * 2
    assert cost().expert_bytes(1) == pytest.approx(48 * one_layer / 16)
    assert cost().expert_bytes(2) == pytest.approx(48 * one_layer * (1 - (15 / 16) ** 2))
    assert cost().expert_bytes(10_000) == pytest.approx(48 * one_layer)
    assert cost().token_parameters == pytest.approx(3.35e9 - 2 * 0.311e9, rel=0.01)  # 3.3 billion are active


@pytest.mark.parametrize("shape", ["llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_what_is_quantised_while_loading_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str) -> None:
    tiny(monkeypatch, shape)
    write_config(tmp_path, shape)
    engine = Engine(
        EngineConfig(model=tmp_path, quantization="fp8", dtype="float32", cache=CacheConfig(num_blocks=8)),
        load=draw_weights,
    )
    q, k, v = products_of(engine._decoder._layers[0])["_qkv"].weight.split((64, 32, 32))
    for weight in (q, k, v):
        assert weight.std() == pytest.approx(0.02, rel=0.3)
        assert all(len(row.unique()) <= 2 * 127 for row in weight)


@pytest.mark.parametrize("shape", DRAWN)
def test_every_parameter_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str) -> None:
    tiny(monkeypatch, shape)
    write_config(tmp_path, shape)
    engine = Engine(EngineConfig(model=tmp_path, dtype="float32", cache=CacheConfig(num_blocks=8)), load=draw_weights)
    weights = engine._decoder.weights
    for name, (destination, *_) in weights.destinations.items():
        if name.endswith("norm.weight"):
            assert bool((destination.tensor == 1).all()), name
        elif destination.tensor.numel() < 1000:
            assert 0 < destination.tensor.abs().max() < 0.2, name
        else:
            assert destination.tensor.std() == pytest.approx(1.0 if name == EMBEDDING else 0.02, rel=0.3), name
    assert read_model_spec(tmp_path).dtype == "bfloat16"
    assert torch.isfinite(engine.kv).all()
