"""Whatever a GGUF file says, an engine starts or refuses it in one line, before a size in there takes memory or time."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.gguf_names import stored_in_gguf
from engine.checkpoint.safetensors import CheckpointError
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import model_spec
from engine.families.gguf import config_of_header
from engine.spec.model import UnsupportedModelError
from modelfiles.files import GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, read_file
from modelfiles.gguf import GgufHeader, GgufTensor, read_header
from tests.gguf_files import changed, write_gguf
from tests.models import build_tiny_model
from tests.unit.engine.gguf.converted import recorded

FILES = (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG)
SIZES = (0, 1, 3, 33, 255, 256, 4096, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
KINDS = (0, 1, 2, 8, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23, 29, 30, 34, 35, 39, 77)


class Hostile:
    """A whole file, and where its header has numbers."""

    def __init__(self, file: Path) -> None:
        self.content, header = file.read_bytes(), read_header(file)
        self.length = header.lengths[0]
        self.entries = [
            self._behind(name) + 4
            for name, value in header.metadata.items()
            if type(value) in (int, float) and value is not None
        ]
        self.tensors = [(self._behind(tensor.name), len(tensor.shape)) for tensor in header.tensors.values()]

    def _behind(self, name: str) -> int:
        text = struct.pack("<Q", len(name)) + name.encode()
        return self.content.index(text) + len(text)


@pytest.fixture(scope="module", params=[("llama", "Q8_0"), ("qwen3", "F32")], ids="-".join)
def hostile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    family, kind = request.param
    folder = tmp_path_factory.mktemp(family)
    return Hostile(write_gguf(build_tiny_model(folder / "model", family), folder / "model.gguf", kind=kind))


def start(file: Path) -> None:
    """Or refuse it, as ValueError of one line."""
    refusals = []
    for read in (
        *(partial(read_file, file, name) for name in FILES),
        partial(Engine, EngineConfig(model=file, cache=CacheConfig(num_blocks=8))),
    ):
        try:
            read()
        except ValueError as error:
            refusals.append(str(error))
    assert not [said for said in refusals if "\n" in said or len(said) > 700]


@given(data=st.data())
def test_whatever_a_header_says_is_served_or_refused(
    hostile: Hostile, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(hostile.content)
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        match data.draw(st.sampled_from(("entry", "tensor", "byte", "cut")), label="what"):
            case "entry":
                at, value = data.draw(st.sampled_from(hostile.entries)), data.draw(st.sampled_from(SIZES))
                struct.pack_into("<I", content, min(at, len(content) - 4), value % 2**32)
            case "tensor":
                at, dimensions = data.draw(st.sampled_from(hostile.tensors))
                field = data.draw(st.integers(0, dimensions + 1))  # dimensions, then the kind, then the offset
                if field == dimensions:
                    form, at, value = "<I", at + 4 + 8 * field, data.draw(st.sampled_from(KINDS))
                else:
                    at += 4 + 8 * field - (4 if field > dimensions else 0)
                    form, value = "<Q", data.draw(st.sampled_from(SIZES))
                struct.pack_into(form, content, min(at, len(content) - 8), value)
            case "byte":
                at = data.draw(st.integers(0, hostile.length - 1))
                content[min(at, len(content) - 1)] = data.draw(st.integers(0, 255))
            case "cut":
                del content[max(16, data.draw(st.integers(0, len(content) - 1))) :]
    file = tmp_path_factory.getbasetemp() / "hostile.gguf"
    file.write_bytes(content)
    start(file)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("feed_forward_length", 2**31 - 1),
        ("attention.key_length", 2**31 - 2),
        ("expert_count", 4096),
    ],
)
def test_a_size_that_the_file_can_not_hold_takes_no_memory(tmp_path: Path, entry: str, value: int) -> None:
    whole = write_gguf(build_tiny_model(tmp_path / "model", "llama"), tmp_path / "whole.gguf")
    more = {"expert_used_count": 2} if entry == "expert_count" else {}
    entries = {f"llama__{name}": number for name, number in {entry: value, **more}.items()}
    file = changed(whole, tmp_path / "changed.gguf", **entries)
    with pytest.raises(
        ValueError, match=r" of the shape \[.*\], by config.json .* more than the checkpoint's files can"
    ):
        Engine(EngineConfig(model=file, cache=CacheConfig(num_blocks=8)))


@pytest.mark.parametrize(
    ("entry", "value", "refusal"),
    [
        (
            "attention.head_count_kv",
            1,
            r"changed.gguf: .*k_proj.weight has shape .*, the GGUF metadata asks for \[16, 64\]",
        ),
        (
            "block_count",
            1,
            r"changed.gguf: unexpected weights model.layers.1.* the GGUF metadata describes another model",
        ),
    ],
)
def test_metadata_of_another_model_is_named(tmp_path: Path, entry: str, value: int, refusal: str) -> None:
    whole = write_gguf(build_tiny_model(tmp_path / "model", "llama"), tmp_path / "whole.gguf")
    file = changed(whole, tmp_path / "changed.gguf", **{f"llama__{entry}": value})
    with pytest.raises(CheckpointError, match=refusal):
        Engine(EngineConfig(model=file, cache=CacheConfig(num_blocks=8)))


@pytest.mark.parametrize("shape", [(2**20,), (2**20, 1, 1)])
def test_no_tensor_is_of_millions_of_experts(tmp_path: Path, shape: tuple[int, ...]) -> None:
    writer = gguf.GGUFWriter(file := tmp_path / "experts.gguf", "qwen3moe")
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros(shape, dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps.weight of the shape \[1048576.* up to 16384 experts"):
        list(stored_in_gguf(file))


def header_of(case: str, file: Path, **metadata: Any) -> GgufHeader:
    """Of a file as the converter writes it, with other entries; its tensors are one small piece of zeros."""
    file.write_bytes(bytes(4096))
    line = recorded()[case]
    architecture = line["architecture"]
    entries = {f"{architecture}.{name}": value for name, value in (line["metadata"] | metadata).items()}
    tensors = {
        name: GgufTensor(name, "F32", tuple(shape), file, 0, 4 * math.prod(shape))
        for name, shape in line["tensors"].items()
    }
    return GgufHeader(file, {"general.architecture": architecture} | entries, tensors, (0,))


@pytest.mark.parametrize(
    ("case", "entry", "value"),
    [
        ("glm4_moe", "leading_dense_block_count", 2**31 - 1),
        ("deepseek_v2", "leading_dense_block_count", -1),
        ("deepseek_v2", "expert_gating_func", 3),
        ("nemotron_h", "attention.head_count_kv", "two"),
        ("gemma4", "attention.key_length", -1),
        ("gemma3n", "feed_forward_length", [96] * 99),
        ("arcee", "attention.head_count_kv", [2, 1]),
        ("glm4", "feed_forward_length", -1),
        ("starcoder2, no window", "rope.dimension_count", "all"),
        ("jamba", "attention.head_count_kv", [0, 2, 2, 0, 0]),
        ("jamba", "ssm.inner_size", 127),
        ("jamba, without experts", "expert_count", 4),
    ],
)
def test_what_a_converter_never_writes_is_named(case: str, entry: str, value: Any, tmp_path: Path) -> None:
    header = header_of(case, tmp_path / "model.gguf", **{entry: value})
    with pytest.raises(UnsupportedModelError, match=rf"\.{entry} = .{{0,40}}( is not supported|, but the file's)"):
        model_spec(config_of_header(header))


def test_a_gemma_4_without_its_rotations_is_refused(tmp_path: Path) -> None:
    header = header_of("gemma4", tmp_path / "model.gguf")
    tensors = {name: tensor for name, tensor in header.tensors.items() if name != "rope_freqs.weight"}
    with pytest.raises(UnsupportedModelError, match=r"there is no tensor rope_freqs\.weight"):
        config_of_header(replace(header, tensors=tensors))


def test_long_lists_are_not_repeated_in_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = header_of("qwen3_5", tmp_path / "model.gguf", **{"ssm.inner_size": [True] * 1000})
    monkeypatch.setattr("engine.checkpoint.gguf_names.read_header", lambda file: header)
    with pytest.raises(CheckpointError, match=r"ssm: .*inner_size = \[True, .{0,60} are no heads"):
        list(stored_in_gguf(header.file))
