"""What GGUF files ask for is computed or refused by name, and their tensors are those of the model."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.encodings import encoding_of
from engine.checkpoint.fingerprint import model_fingerprint
from engine.checkpoint.gguf_names import stored_in_gguf
from engine.checkpoint.safetensors import CheckpointError, StoredTensor
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import model_spec, read_model_spec
from engine.families.gguf import config_of_header
from engine.foreign import is_foreign
from engine.kernels.quantised.gguf_blocks import BLOCK_ELEMENTS, DECODERS
from engine.spec.attention import AttentionSpec
from engine.spec.model import UnsupportedModelError
from engine.spec.scaling import YarnScaling
from modelfiles import tokenizer
from modelfiles.gguf import GgufError, GgufHeader, read_header
from tests.examples import examples
from tests.gguf_files import changed, write_gguf
from tests.models import build_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (
            {"general__architecture": "mamba"},
            r"general.architecture: mamba is not served \(docs/models.md\); nearest: jamba",
        ),
        ({"llama__attention.clamp_kqv": 3.0}, r"llama.attention.clamp_kqv = 3.0 is not supported"),
        ({"llama__rope.scaling.type": "spiral"}, r"llama.rope.scaling.type = spiral is not supported"),
        ({"llama__block_count": None}, r"llama.block_count is missing"),
        (
            {"llama__embedding_length": 2**30},
            "llama.embedding_length = 1073741824, but the file's tensors say otherwise",
        ),
        (
            {"llama__rope.dimension_count": 2**30},
            "changed.gguf, read as a config.json: .* rotates .*: at most all of it",
        ),
        ({"llama__context_length": 2**32 - 1}, "llama.context_length = 4294967295 is not supported"),
        ({"llama__attention.head_count": 0}, "llama.attention.head_count = 0 is not supported"),
        ({"llama__rope.scaling.factor": 4.0}, "llama.rope.scaling.factor = 4.0 is not supported"),
        ({"llama__rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor = 2.0 is not supported"),
        ({"llama__attention.causal": False}, "llama.attention.causal = False is not supported"),
        (
            {"llama__rope.scaling.type": "yarn", "llama__rope.scaling.yarn_ext_factor": 0.5},
            "llama.rope.scaling.yarn_ext_factor = 0.5 is not supported",
        ),
        ({"llama__rope.scaling.yarn_attn_factor": 2.0}, "llama.rope.scaling.yarn_attn_factor = 2.0 is not supported"),
        ({"llama__nextn_predict_layers": 2}, "llama.nextn_predict_layers = 2, but the file's tensors say otherwise"),
        (
            {"llama__rope.freq_base": 1.0},
            "changed.gguf, read as a config.json: .* at most all of it, by a number above 1",
        ),
    ],
)
def test_a_wrong_entry_is_named(folder: Path, tmp_path: Path, entries: dict[str, Any], complaint: str) -> None:
    file = changed(write_gguf(folder, tmp_path / "whole.gguf"), tmp_path / "changed.gguf", **entries)
    with pytest.raises(UnsupportedModelError, match=complaint):
        read_model_spec(file)


@pytest.mark.parametrize(
    ("entries", "magnitude"), [({}, 1 + 0.1 * math.log(8)), ({"attn_factor": 1.5}, 1.5), ({"log_multiplier": 1.0}, 1.0)]
)
def test_yarns_magnitude_is_what_the_file_says(
    folder: Path, tmp_path: Path, entries: dict[str, float], magnitude: float
) -> None:
    yarn = {"type": "yarn", "factor": 8.0, "original_context_length": 16, "yarn_ext_factor": 1.0}
    yarn |= {f"yarn_{name}": value for name, value in entries.items()}
    whole = write_gguf(folder, tmp_path / "whole.gguf")
    file = changed(whole, tmp_path / "changed.gguf", **{f"llama__rope.scaling.{name}": yarn[name] for name in yarn})
    mixer = read_model_spec(file).layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope is not None
    assert isinstance(mixer.rope.scaling, YarnScaling)
    assert mixer.rope.scaling.attention_factor == pytest.approx(magnitude)


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_queries_keys_and_values_in_one_are_refused_where_their_rows_were_changed(
    tmp_path: Path, architecture: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_tensor("blk.0.attn_qkv.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_qkv\.weight holds .* convert without --fuse-qkv"):
        list(stored_in_gguf(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "kind", sorted(name for name, size in BLOCK_ELEMENTS.items() if size > 1 and name not in DECODERS)
)
def test_a_kind_of_weights_that_is_not_known_is_refused_with_what_to_do(kind: str) -> None:
    stored = StoredTensor("model.norm.weight", kind, (256,), Path("model.gguf"), 0, 1)

    with pytest.raises(CheckpointError, match=rf"model.norm.weight holds {kind}, .*take a file of Q4_K_M"):
        encoding_of(stored, torch.float32)


def test_weights_of_another_shape_are_named(folder: Path, tmp_path: Path) -> None:
    whole = write_gguf(folder, tmp_path / "whole.gguf")
    file = changed(whole, tmp_path / "changed.gguf", llama__feed_forward_length=128)
    with pytest.raises(CheckpointError, match=r"mlp.down_proj.weight has shape \[64, 96\].* asks for \[64, 128\]"):
        Engine(EngineConfig(model=file, cache=CacheConfig(num_blocks=8)))


def test_parts_are_one_model(folder: Path, tmp_path: Path) -> None:
    one = write_gguf(folder, tmp_path / "one.gguf")
    split = write_gguf(folder, tmp_path / "split.gguf", parts=3)
    assert read_model_spec(split) == read_model_spec(one)
    first, second = ({tensor.name: bytes_of(tensor) for tensor in stored_in_gguf(file)} for file in (one, split))
    assert first == second


def bytes_of(tensor: StoredTensor) -> bytes:
    return tensor.file.read_bytes()[tensor.begin : tensor.end]


def test_the_fingerprint_tells_weights_kinds_and_metadata_apart(folder: Path, tmp_path: Path) -> None:
    files = [write_gguf(folder, tmp_path / f"{kind}.gguf", kind=kind) for kind in ("F32", "F16", "Q8_0")]
    files.append(changed(files[0], tmp_path / "other.gguf", **{"llama__rope.freq_base": 5000.0}))
    changed_value = bytearray(files[0].read_bytes())
    floats = np.frombuffer(changed_value, dtype=np.uint8)
    end = max(tensor.data_offset + tensor.n_bytes for tensor in gguf.GGUFReader(files[0]).tensors)
    middle = (end + gguf.GGUFReader(files[0]).tensors[-1].data_offset) // 2
    assert floats[middle - 1] == changed_value[middle - 1]
    changed_value[middle - 1] ^= 1
    (tmp_path / "value.gguf").write_bytes(changed_value)
    files.append(tmp_path / "value.gguf")
    assert len({model_fingerprint(file) for file in files}) == len(files)


def test_transformers_is_not_asked_for_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="model_impl = transformers reads no GGUF files: use auto"):
        is_foreign(EngineConfig(model=file, model_impl="transformers"))
    assert not is_foreign(EngineConfig(model=file))


ODD = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), min_size=1),
)
ENTRIES = (
    *("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"),
    *("tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template"),
    *("llama.block_count", "llama.attention.head_count", "llama.attention.head_count_kv", "llama.embedding_length"),
    *("llama.attention.key_length", "llama.rope.dimension_count", "llama.rope.freq_base", "llama.rope.scaling.type"),
    *("llama.rope.scaling.factor", "llama.expert_count", "llama.context_length", "llama.feed_forward_length"),
)


@given(entries=st.dictionaries(st.sampled_from(ENTRIES), ODD, min_size=1, max_size=3))
@examples(120)
def test_whatever_metadata_say_is_read_or_refused(read: GgufHeader, entries: dict[str, Any]) -> None:
    header = replace(read, metadata={**read.metadata, **entries})
    with contextlib.suppress(UnsupportedModelError, ValueError):
        model_spec(config_of_header(header))
    for describe in (tokenizer.tokenizer_json, tokenizer.tokenizer_config, tokenizer.generation_config):
        with contextlib.suppress(GgufError):
            describe(header.metadata)


def test_layers_beyond_all_bounds_are_refused_before_they_are_counted(read: GgufHeader) -> None:
    metadata = {name.replace("llama.", "qwen3moe."): value for name, value in read.metadata.items()}
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "block_count": 2**31 - 1}
    metadata |= {f"qwen3moe.{name}": value for name, value in experts.items()}
    header = replace(read, metadata=metadata | {"general.architecture": "qwen3moe"})
    with pytest.raises(UnsupportedModelError, match=r"block_count = 2147483647, but the file's tensors say"):
        model_spec(config_of_header(header))


@pytest.fixture(scope="module")
def read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    return read_header(write_gguf(folder, tmp_path_factory.mktemp("file") / "model.gguf"))
