"""Models of the cache are whole: all folders of a model of vectors, bytes on the disk, copies as links."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import IO

import pytest
import torch

from common.settings import ROOT
from modelfiles.pooling import is_pooled, read_pooling
from services.runtime.models.named import brought, by_name
from tests.hub import Hub

FILES = {name: (ROOT / "demo" / name).read_bytes() for name in ("config.json", "tokenizer.json", "model.safetensors")}
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
DENSE = {"in_features": 8, "out_features": 4, "bias": False, "activation_function": "torch.nn.Tanh"}


def head_of(outputs: int) -> bytes:
    """bge-m3's kind of file: a matrix of 8 columns and its bias."""
    file = io.BytesIO()
    torch.save(torch.nn.Linear(8, outputs).state_dict(), file)
    return file.getvalue()


VECTORS = {
    "config.json": json.dumps(
        {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8, "vocab_size": 99}
    ).encode(),
    "tokenizer.json": FILES["tokenizer.json"],
    "model.safetensors": FILES["model.safetensors"],
    "modules.json": json.dumps(
        [
            {"idx": at, "path": f"{at}_{name}" if at else "", "type": f"sentence_transformers.models.{name}"}
            for at, name in enumerate(MODULES)
        ]
    ).encode(),
    "sentence_bert_config.json": json.dumps({"max_seq_length": 33}).encode(),
    "config_sentence_transformers.json": json.dumps({"prompts": {"query": "q: "}}).encode(),
    "1_Pooling/config.json": json.dumps({"pooling_mode": "cls", "include_prompt": False}).encode(),
    "2_Dense/config.json": json.dumps(DENSE).encode(),
    "2_Dense/model.safetensors": b"weights",
    "artifact.metadata": b"{}",
    "sparse_linear.pt": head_of(1),
    "colbert_linear.pt": head_of(4),
}
OTHERS = {"2_Dense/pytorch_model.bin": b"pickled", "onnx/model.onnx": b"0", "openvino/config.json": b"{}"}


def there(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def pooled_as_its_makers_say(folder: Path) -> bool:
    pooling = read_pooling(folder)
    (dense,) = pooling.dense
    made = pooling.modes, pooling.max_len, pooling.normalizes, dense.outputs, dense.activation, pooling.prompts.texts
    return is_pooled(folder) and made == (("cls",), 33, True, 4, "Tanh", {"query": "q: "})


def test_a_model_of_vectors_comes_with_the_folders_of_its_modules(hub: Hub) -> None:
    hub.add("org/vectors", VECTORS | OTHERS)
    folder = by_name("org/vectors", print)
    assert there(folder) == VECTORS
    assert pooled_as_its_makers_say(folder)


def test_a_gateway_fetches_what_says_how_vectors_are_pooled(hub: Hub) -> None:
    hub.add("org/vectors", VECTORS | OTHERS)
    folder = brought(Path("org/vectors"), print, text_alone=True)
    assert {*VECTORS} - {*there(folder)} == {"model.safetensors"}
    assert pooled_as_its_makers_say(folder)


def test_a_pull_completes_a_model_of_vectors_that_lacks_a_module(hub: Hub) -> None:
    hub.add("org/vectors", VECTORS)
    folder = by_name("org/vectors", print)
    shutil.rmtree(folder / "1_Pooling")  # as releases left it that fetched no folders
    assert by_name("org/vectors", print, newest=True) == folder
    assert pooled_as_its_makers_say(folder)


def test_a_file_gets_its_name_once_its_bytes_are_on_the_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/demo", FILES)
    on_disk, named = dict[int, int](), dict[str, bool]()
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def renamed(file: Path, target: Path) -> Path:
        found = file.stat()
        named[target.name] = on_disk.get(found.st_ino) == found.st_size
        return replace(file, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    folder = by_name("org/demo", print)
    assert named == {file.resolve().name: True for file in folder.iterdir()}


def test_where_there_are_no_links_a_copy_appears_once_it_is_whole(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/demo", FILES)
    copied = shutil.copyfileobj

    def refused(*_: object) -> None:
        raise OSError("no links here")

    def killed(source: IO[bytes], target: IO[bytes]) -> None:
        target.write(source.read(9))
        target.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "symlink_to", refused)
    monkeypatch.setattr(shutil, "copyfileobj", killed)
    with pytest.raises(KeyboardInterrupt):
        by_name("org/demo", print)
    monkeypatch.setattr(shutil, "copyfileobj", copied)
    folder = by_name("org/demo", print)
    assert there(folder) == FILES
    assert not any(file.is_symlink() for file in folder.iterdir())
