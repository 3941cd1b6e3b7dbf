"""Loading checkpoints: complete or refused with a reason, never unpickled; fingerprints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.fingerprint import model_fingerprint
from engine.checkpoint.safetensors import stored_tensors
from engine.families import read_model_spec
from engine.model.decoder import Decoder
from engine.weights import loader
from engine.weights.loader import CheckpointError, load_weights, weight_files
from tests.models import FAMILIES, build_tiny_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path) -> Decoder:
    decoder = Decoder(read_model_spec(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, folder)
    return decoder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Where each of the checkpoint's tensors went, once they are loaded."""
    return {name: places[0].tensor for name, places in load(folder).weights.destinations.items()}


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
    weights = load(folder).weights
    assert all(any(names <= stored.keys() for names in ways) for ways in weights.ways)
    for name, weight in stored.items():
        assert torch.equal(weights.destinations[name][0].tensor.reshape(weight.shape), weight), name


def test_query_key_and_value_are_parts_of_one_matrix(tiny_model: Callable[[str], Path]) -> None:
    views = loaded(tiny_model("qwen2"))
    for kind in ("weight", "bias"):
        q, k, v = (views[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv")
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_a_tied_head_in_the_checkpoint_is_not_needed(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "tied"))
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": torch.full((512, 64), 7.0)}))
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    views = loaded(folder)
    assert "lm_head.weight" not in views
    assert torch.equal(views["model.embed_tokens.weight"], stored), "the head's tensor replaced the embedding"


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


def test_a_weight_in_two_files_is_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "doubled"))
    file = folder / "model-00002-of-00003.safetensors"
    weights = load_file(folder / "model-00001-of-00003.safetensors") | load_file(file)
    twice = sorted(weights.keys() - load_file(file).keys())[0]
    save_file({name: weight for name, weight in weights.items() if name == twice or name in load_file(file)}, file)
    with pytest.raises(CheckpointError, match=f"weights {twice} are in several files"):
        load(folder)


def test_a_misshaped_weight_is_named_with_both_shapes(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(32, 64)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} has shape \[32, 64\], config.json asks for \[64, 64\]"):
        load(folder)


def test_integers_are_not_taken_for_weights(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="holds I8: quantised weights that quantization_config"):
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("limit", [48, 1000, 1 << 20])
def test_weights_are_cut_and_converted_wherever_they_lie(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: int
) -> None:
    change_weights(folder, lambda weights: weights.update({name: w.to(dtype) for name, w in weights.items()}))
    misalign(folder / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    monkeypatch.setattr(loader, "CPU_BUFFER_BYTES", limit)
    views = loaded(folder)
    assert all(torch.equal(views[name], weight.float()) for name, weight in stored.items())


def misalign(file: Path) -> None:
    """Lengthen the header by a blank: tensors begin at odd addresses."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda header: header["a"].update(data_offsets=[0, 9]), "does not take 9 bytes"),
        (lambda header: header["a"].update(data_offsets=[-8, 0]), "data_offsets"),
        (lambda header: header["a"].update(data_offsets=[0, 8, 8]), "data_offsets"),
        (lambda header: header["a"].update(shape=[2.0]), "has shape"),
        (lambda header: header["a"].update(shape=[True, 2]), "has shape"),
        (lambda header: header["a"].update(dtype="F33"), "unknown dtype 'F33'"),
        (lambda header: header["a"].update(dtype=["F32"]), "unknown dtype"),
        (lambda header: header["a"].update(elsewhere="x"), "other fields"),
        (lambda header: header.update(a=1), "other fields"),
        (lambda header: header["b"].update(data_offsets=[4, 12]), "begins at byte"),
        (lambda header: header["b"].update(data_offsets=[12, 20]), "begins at byte"),
        (lambda header: header.pop("b"), "is it truncated"),
    ],
)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, change: Callable[[dict[str, dict[str, object]]], object], complaint: str
) -> None:
    header: dict[str, dict[str, object]] = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
    write(tmp_path, json.dumps(header).encode())
    assert [(tensor.name, tensor.end - tensor.begin) for tensor in stored_tensors(tmp_path)] == [("a", 8), ("b", 8)]
    change(header)
    write(tmp_path, json.dumps(header).encode())
    with pytest.raises(CheckpointError, match=f"can't be read as safetensors.*{complaint}"):
        list(stored_tensors(tmp_path))


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff", b"1", b'{"a": {}, "a": {}}', b"[" * 100_000])
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    write(tmp_path, header)
    with pytest.raises(CheckpointError, match="can't be read as safetensors"):
        list(stored_tensors(tmp_path))


def write(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))


def test_a_file_that_shrinks_while_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="has become shorter"):
        load(folder)


@pytest.mark.parametrize("offsets", ["[-9, 4]", "[8, 0]", "[0, 1e3]", "[0]", "{}", '["a", "b"]', "[" * 100_000])
def test_a_fingerprint_reads_nothing_beside_the_tensors(folder: Path, offsets: str) -> None:
    write(folder, f'{{"a": {{"dtype": "F32", "shape": [2], "data_offsets": {offsets}}}}}'.encode())
    with pytest.raises(CheckpointError, match="no valid safetensors header"):
        model_fingerprint(folder)


def test_a_missing_shard_is_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "sharded"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load(folder)


@pytest.mark.parametrize(
    "content",
    [
        '{"weight_map": {"a": "../elsewhere.safetensors"}}',
        "[]",
        "{",
        '{"weight_map": 1}',
        "[" * 100_000,
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ".."}}',
    ],
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
