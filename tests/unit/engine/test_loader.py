"""Loading checkpoints: complete or refused with a reason, never unpickled; fingerprints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loader import CheckpointError, load_weights, model_fingerprint, tokenizer_fingerprint, weight_files
from engine.models.config import read_decoder_config
from engine.models.decoder import Decoder
from tests.models import FAMILIES, build_tiny_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path) -> Decoder:
    config = read_decoder_config(folder)
    decoder = Decoder(config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder, folder)
    return decoder


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be spoilt."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_lands_where_it_belongs(tiny_model: Callable[[str], Path], family: str) -> None:
    folder = tiny_model(family)
    stored = {name: weight for file in weight_files(folder) for name, weight in load_file(file).items()}
    destinations = load(folder).destinations()
    assert stored.keys() == destinations.keys()
    assert all(torch.equal(destinations[name], weight) for name, weight in stored.items())


def test_query_key_and_value_are_parts_of_one_matrix(tiny_model: Callable[[str], Path]) -> None:
    views = load(tiny_model("qwen2")).destinations()
    for kind in ("weight", "bias"):
        q, k, v = (views[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv")
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_a_tied_head_in_the_checkpoint_is_not_needed(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "tied"))
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": torch.zeros(512, 64)}))
    load(folder)


def test_a_second_copy_under_another_name_is_left_alone(folder: Path) -> None:
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    load(folder)


def test_a_missing_weight_is_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(Q_PROJ))
    with pytest.raises(CheckpointError, match=f"missing weights {Q_PROJ}"):
        load(folder)


def test_an_unexpected_weight_is_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.layers.7.mlp.extra": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"unexpected weights model\.layers\.7\.mlp\.extra"):
        load(folder)


def test_a_misshaped_weight_is_named_with_both_shapes(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(32, 64)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} has shape \[32, 64\], config.json asks for \[64, 64\]"):
        load(folder)


def test_integers_are_not_taken_for_weights(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="quantised weights are not supported"):
        load(folder)


def test_pickled_weights_are_refused_with_the_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        load(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="can't be read as safetensors"):
        load(folder)
    file.write_bytes(b"\xff" * 7)
    with pytest.raises(CheckpointError, match="truncated"):
        model_fingerprint(folder)


def test_a_missing_shard_is_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "sharded"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load(folder)


@pytest.mark.parametrize(
    "content", ['{"weight_map": {"a": "../elsewhere.safetensors"}}', "[]", "{", '{"weight_map": 1}']
)
def test_a_malformed_index_is_refused(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(folder)


def test_the_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    before = model_fingerprint(folder)
    assert len(before) == 32
    assert model_fingerprint(Path(shutil.copytree(folder, tmp_path / "elsewhere"))) == before


def test_another_seed_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    assert model_fingerprint(build_tiny_model(tmp_path / "other", "llama", seed=1)) != model_fingerprint(folder)


def test_a_fine_tune_of_one_matrix_has_another_fingerprint(folder: Path) -> None:
    before = model_fingerprint(folder)
    change_weights(folder, lambda weights: weights.update({Q_PROJ: weights[Q_PROJ] * 1.01}))
    assert model_fingerprint(folder) != before


def test_another_configuration_has_another_fingerprint(folder: Path) -> None:
    before = model_fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert model_fingerprint(folder) != before


def test_tokenizers_differ_by_their_bytes(folder: Path) -> None:
    file = folder / "tokenizer.json"
    before = tokenizer_fingerprint(file)
    file.write_text(file.read_text() + "\n")
    assert tokenizer_fingerprint(file) != before
