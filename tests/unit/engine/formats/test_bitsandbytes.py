# mypy: allow-untyped-calls
"""Checkpoints of bitsandbytes answer as the plain checkpoints of the same values do."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.families import read_model_spec
from engine.families.quantised.bitsandbytes import in_files
from engine.formats.codebook import Codebook4, Module4, OfCodebook
from engine.formats.dense import Dense
from engine.formats.grouped import Grouped
from engine.formats.groups import plain
from engine.formats.packed import RowsOfBytes
from engine.formats.product import Format, LinearSpec
from engine.spec.model import UnsupportedModelError
from engine.weights.loader import load_weights
from engine.weights.parameters import Shard, Weights
from tests.unit.engine.formats.checkpoints import plain_of, refused, written
from tests.unit.engine.formats.codebooks import WRITTEN, codebook4, rows_of_bytes, state_of
from tests.unit.engine.formats.loading import MOE, Form, Tiny, answer, loaded, single

HEAD = ("lm_head",)
# As transformers writes it.
OF_4_BITS = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}
OF_8_BITS = OF_4_BITS | {"load_in_4bit": False, "load_in_8bit": True}
FORMS = {
    "nf4": Form("llama", codebook4("nf4", nested=True), {"quantization_config": OF_4_BITS}, HEAD),
    "fp4, some modules plain": Form(
        "qwen2",
        codebook4("fp4", nested=False),
        {"quantization_config": OF_4_BITS | {"llm_int8_skip_modules": ["lm_head", "k_proj"]}},
        (*HEAD, "k_proj", "layers.0.mlp"),
    ),
    "nf4, experts": Form(
        "qwen3_moe", codebook4("nf4", nested=True), {"quantization_config": OF_4_BITS}, (*HEAD, "mlp.gate.")
    ),
    "8 bits": Form("llama", rows_of_bytes, {"quantization_config": OF_8_BITS}, HEAD),
}
DIGESTS = {
    "nested": "b4a12f6efc056803acd5c84de39bd090a06688296d68fb23ae209b69e9d5dcb0",
    "floats": "1bbadeb245f3d51ca05a7e219abd733b7826682def0e7a9f0f8cc0c0db325ca6",
    "rows": "1aa0b5e057f42ad1418447824d445d4ac968932755dbb196eacdf442d9965e5e",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_checkpoint_answers_as_what_it_stands_for(form: Form, tiny_model: Tiny, tmp_path: Path) -> None:
    source = single(tiny_model, form.family, tmp_path)
    if form.family == "qwen3_moe":
        source = replace(MOE, fields={**MOE.fields, "moe_intermediate_size": 64}).build(tmp_path / "of 64")
    folder = written(source, tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    said = answer(folder)
    assert said == answer(plain_of(folder))
    assert len(set(said)) > 3, "a model that repeats itself shows nothing"


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices stay in groups, and the kernels' plain versions multiply with them."""
    for module in ("groups", "grouped", "codebook"):
        monkeypatch.setattr(f"engine.formats.{module}.use_triton", lambda x: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("name", "plain"), [("nf4", 2), ("fp4, some modules plain", 1), ("nf4, experts", 1)])
def test_codes_stay_codes_on_a_gpu(name: str, plain: int, tiny_model: Tiny, tmp_path: Path) -> None:
    """Where a row is whole blocks: that of a `down_proj` has 96 numbers."""
    form = FORMS[name]
    source = single(tiny_model, form.family, tmp_path)
    if form.family == "qwen3_moe":
        source = replace(MOE, fields={**MOE.fields, "moe_intermediate_size": 64}).build(tmp_path / "of 64")
    folder = written(source, tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    assert answer(folder) == answer(plain_of(folder))
    decoder = loaded(folder)
    assert decoder.weights.made_plain == Counter(OfCodebook=plain)
    assert not decoder.weights.differing


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_matrix_of_4_bits_takes_their_memory() -> None:
    format = Codebook4(kind="nf4", block=64, scales_block=256, modules={"m": Module4("m", (96, 512))})
    weights = Weights(torch.bfloat16, torch.device("cpu"))
    spec = LinearSpec(inputs=512, outputs={"m": 96}, bias=False, shard=Shard.NONE)
    product = format.linear(spec, weights, under="")
    assert isinstance(product, Grouped)
    assert product.weight.num_bytes == 96 * 512 * (4 + 32 / 64) / 8


@pytest.mark.parametrize(("inputs", "block"), [(128, 16), (192, 64), (256, 128), (128, 512), (384, 256)])
def test_groups_hold_the_numbers_of_blocks(inputs: int, block: int) -> None:
    """Blocks of more inputs than a group or a row has, the last of them smaller."""
    torch.manual_seed(2)
    elements = 5 * inputs
    parts = {
        "weight": torch.randint(0, 256, (elements // 2,), dtype=torch.uint8),
        "weight.quant_map": torch.randn(16),
        "weight.absmax": torch.rand(-(-elements // block)),
    }
    stored = OfCodebook(Codebook4(kind="nf4", block=block, scales_block=0, modules={}), Module4("m", (5, inputs)))
    assert torch.equal(plain(stored, parts), stored.plain(parts))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("inputs", "size", "stays"), [(256, 1, True), (256, 4, True), (256, 8, False), (96, 1, False)])
def test_blocks_that_rows_or_ranks_cut_become_plain(inputs: int, size: int, stays: bool, tmp_path: Path) -> None:
    stored, stands_for = codebook4("nf4", nested=False)("m", torch.randn(8, inputs))
    save_file({f"m.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    format = in_files(tmp_path).format_of(["m"])
    for rank in range(size):
        weights = Weights(torch.float32, torch.device("cpu"), rank=rank, size=size)
        spec = LinearSpec(inputs=inputs, outputs={"m": 8}, bias=False, shard=Shard.INPUTS)
        product = format.linear(spec, weights, under="")
        load_weights(weights, tmp_path)
        weights.settle()
        assert isinstance(product, Grouped if stays else Dense)
        share = stands_for.chunk(size, 1)[rank]
        assert torch.equal(product(torch.eye(share.shape[1])).T, share)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_codebooks_that_differ_within_a_product_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    form = FORMS["nf4"]
    folder = written(tiny_model("llama"), tmp_path / "quantised", form.store, form.config, keeps=HEAD)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.k_proj.weight.quant_map"
    save_file(tensors | {name: tensors[name] + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj: its quant_map is not that of .*k_proj"):
        loaded(folder).weights.settle()


@pytest.mark.parametrize("module", DIGESTS)
def test_what_bitsandbytes_wrote_stands_for_the_numbers_that_it_said(module: str, tmp_path: Path) -> None:
    shutil.copy(WRITTEN, tmp_path / "model.safetensors")
    format, tensors = in_files(tmp_path).format_of([module]), load_file(WRITTEN)
    stored: OfCodebook | RowsOfBytes
    if module == "rows":
        assert isinstance(format, RowsOfBytes)
        stored, shape = format, (8, 64)
    else:
        assert isinstance(format, Codebook4)
        stored, shape = OfCodebook(format, format.modules[module]), format.modules[module].shape
    parts = {kind: tensors[f"{module}.{kind}"].view(part.shape) for kind, part in stored.tensors(*shape).items()}
    matrix = stored.plain(parts).contiguous()
    assert matrix.shape == shape
    assert hashlib.sha256(matrix.numpy().tobytes()).hexdigest() == DIGESTS[module]


def test_the_last_block_may_be_smaller() -> None:
    format = Codebook4(kind="nf4", block=16, scales_block=0, modules={})
    parts = {
        "weight": torch.tensor([0x1F] * 10, dtype=torch.uint8),
        "weight.quant_map": torch.arange(16.0),
        "weight.absmax": torch.tensor([1.0, 2.0]),
    }
    stored = OfCodebook(format, Module4("m", (1, 19)))
    assert {kind: tuple(part.shape) for kind, part in parts.items()} == {
        kind: part.shape for kind, part in stored.tensors(1, 19).items()
    }
    assert stored.plain(parts).tolist() == [[1, 15] * 8 + [2, 30, 2]]


def test_modules_of_a_stack_keep_what_is_said_of_each(tiny_model: Tiny, tmp_path: Path) -> None:
    form = FORMS["nf4"]
    folder = written(tiny_model("llama"), tmp_path / "quantised", form.store, form.config, keeps=HEAD)
    formats: set[Format] = set()
    spec = read_model_spec(folder)
    for name in ("q_proj", "k_proj", "v_proj"):
        formats.add(spec.format_of(f"model.layers.0.self_attn.{name}"))
    (format,) = formats  # so one product computes all three
    assert isinstance(format, Codebook4)
    assert len({module.mean for module in format.modules.values()}) == len(format.modules)
    assert loaded(folder).weights.made_plain["OfCodebook"] > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": [64]}, "shape"),
        ({"shape": [64.0, 64]}, "shape"),
        ({"blocksize": 48}, "blocksize"),
        ({"nested_blocksize": 0}, "nested_blocksize"),
        ({"nested_dtype": "float16"}, "nested_dtype"),
        ({"nested_offset": "much"}, "much"),
        ({"nested_offset": float("inf")}, "nested_offset = inf"),
        ({"nested_offset": 10**400}, "too large"),
        ({"more": "x" * 5000}, "at most 4096 bytes"),
    ],
)
def test_what_a_state_says_wrongly_is_refused_by_its_name(
    wrong: dict[str, Any], message: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    store = codebook4("nf4", nested=True, **wrong)
    folder = written(tiny_model("llama"), tmp_path / "quantised", store, {"quantization_config": OF_4_BITS}, keeps=HEAD)
    with pytest.raises(UnsupportedModelError, match=rf"quant_state\.bitsandbytes__nf4.*{message}"):
        read_model_spec(folder)


def test_a_state_of_another_shape_is_refused_with_the_module(tiny_model: Tiny, tmp_path: Path) -> None:
    store = codebook4("nf4", nested=True, shape=[32, 128])
    folder = written(tiny_model("llama"), tmp_path / "quantised", store, {"quantization_config": OF_4_BITS}, keeps=HEAD)
    with pytest.raises(ValueError, match=r"self_attn\.\w_proj: its quant_state has the shape \[32, 128\]"):
        loaded(folder)


def test_an_expert_that_is_plain_beside_others_is_refused(tmp_path: Path) -> None:
    form = FORMS["nf4, experts"]
    source = replace(MOE, fields={**MOE.fields, "moe_intermediate_size": 64}).build(tmp_path / "of 64")
    folder = written(source, tmp_path / "quantised", form.store, form.config, keeps=(*form.keeps, "experts.2.up_proj"))
    with pytest.raises(ValueError, match=r"experts\.2\.up_proj has no quant_state"):
        loaded(folder)


def test_other_orders_of_rows_are_refused(tmp_path: Path) -> None:
    tensors = load_file(WRITTEN) | {"rows.weight_format": torch.ones((), dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"rows\.weight_format: only rows"):
        in_files(tmp_path)


def test_states_are_read_only_as_bytes(tmp_path: Path) -> None:
    name = "floats.weight.quant_state.bitsandbytes__fp4"
    save_file({name: state_of("fp4", shape=[2, 64]).float()}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"{name} must be at most 4096 bytes"):
        in_files(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({"load_in_4bit": "yes"}, "load_in_4bit"),
        ({"codebook": 3}, "codebook = 3"),
    ],
)
def test_unknown_fields_are_refused(config: dict[str, Any], message: str, tiny_model: Tiny, tmp_path: Path) -> None:
    refused(OF_4_BITS | config, message, tiny_model("llama"), tmp_path)
