"""Random checkpoints: the engine loads them, and the same arguments give the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.weights import checkpoint
from benchmarks.weights.checkpoint import SHAPES, write_checkpoint
from engine.families import read_model_spec
from engine.model.decoder import Decoder
from engine.weights.loader import load_weights

TINY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fields in SHAPES.items():
        monkeypatch.setitem(SHAPES, name, fields | TINY)
    monkeypatch.setattr(checkpoint, "NOISE_ELEMENTS", 10_007)  # the noise repeats within a matrix


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_shape_loads(tmp_path: Path, shape: str, shards: int) -> None:
    write_checkpoint(tmp_path, shape, shards=shards)
    decoder = Decoder(read_model_spec(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, tmp_path)
    weights = {name: places[0].tensor for name, places in decoder.weights.destinations.items()}
    assert all(bool((weight == 1).all()) for name, weight in weights.items() if name.endswith("norm.weight"))
    matrices = [weight.float() for name, weight in weights.items() if not name.endswith("norm.weight")]
    assert all(weight.std() == pytest.approx(0.02, rel=0.3) for weight in matrices)


@pytest.mark.usefixtures("_tiny")
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        write_checkpoint(tmp_path / name, "qwen3-small", seed=seed)
    first, second, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second", "other")
    )
    assert first == second != other
