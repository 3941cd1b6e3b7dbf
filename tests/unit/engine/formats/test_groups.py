# mypy: allow-untyped-calls
"""Checkpoints of 4 and 8 bits in groups answer as the plain checkpoints of the same values do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.fingerprint import model_fingerprint
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.formats import grouped
from engine.formats.grouped import Grouped, WhenLoaded, serving
from engine.formats.int4 import quantise_groups
from engine.formats.int8 import ROUNDED, Int8Linear
from engine.kernels.experts import Experts
from engine.kernels.quantised.groups import Groups, values
from engine.kernels.quantised.int8 import multiplies_bytes
from engine.kernels.quantised.repack import unpacked
from engine.model.decoder import Decoder
from engine.model.layers.sparse_mlp import SparseMlp
from engine.weights.parameters import Weights
from tests.unit.engine.families.case import Case
from tests.unit.engine.formats.checkpoints import Tensors, plain_of, refused, written
from tests.unit.engine.formats.forms import AWQ, FORMS, GPT_OSS, GPTQ, HEAD, MOE, in_mxfp4, ours, source_of
from tests.unit.engine.formats.loading import Form, Tiny, answer, loaded
from tests.unit.engine.insides import parts_of
from tests.unit.kernels.group_checks import KINDS, matrix
from tests.unit.kernels.references import silu_and_mul


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_checkpoint_in_groups_answers_as_what_it_stands_for(form: Form, tiny_model: Tiny, tmp_path: Path) -> None:
    source = source_of(form, tiny_model, tmp_path)
    folder = written(source, tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    said = answer(folder)
    assert said == answer(plain_of(folder))
    assert len(set(said)) > 3, "a model that repeats itself shows nothing"


def test_experts_of_gpt_oss_in_floats_of_4_bits(tmp_path: Path) -> None:
    case = replace(GPT_OSS, fields={**GPT_OSS.fields, "intermediate_size": 96})
    folder = in_mxfp4(case.build(tmp_path / "gpt_oss"), tmp_path / "quantised")
    said = answer(folder)
    assert said == answer(plain_of(folder))
    assert len(set(said)) > 3


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices stay in groups, and the kernels' plain versions multiply with them."""
    for module in ("groups", "grouped", "int4", "mxfp4"):
        monkeypatch.setattr(f"engine.formats.{module}.use_triton", lambda x: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["awq", "awq, experts", "gptq, order of activations", "modelopt, nvfp4"])
def test_matrices_stay_in_groups_on_a_gpu(name: str, tiny_model: Tiny, tmp_path: Path) -> None:
    source, form = source_of(FORMS[name], tiny_model, tmp_path), FORMS[name]
    folder = written(source, tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    assert answer(folder) == answer(plain_of(folder))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_experts_of_gpt_oss_stay_in_4_bits_on_a_gpu(tmp_path: Path) -> None:
    case = replace(GPT_OSS, fields={**GPT_OSS.fields, "intermediate_size": 96})
    folder = in_mxfp4(case.build(tmp_path / "gpt_oss"), tmp_path / "quantised")
    assert answer(folder) == answer(plain_of(folder))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("case", [MOE, GPT_OSS], ids=lambda case: case.name)
def test_experts_become_groups_while_they_are_loaded(case: Case, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 48} if case is MOE else {"intermediate_size": 96}
    folder = replace(case, fields={**case.fields, **sizes}).build(tmp_path / "plain")
    plain, groups = experts_of(loaded(folder)), experts_of(loaded(folder, quantization="int4"))
    assert len(plain) == len(groups) > 0
    for one, theirs in zip(groups, plain, strict=True):
        for weight, plain_one in ((one.gate_up, theirs.gate_up), (one.down, theirs.down)):
            assert isinstance(weight, Groups)
            assert isinstance(plain_one, torch.Tensor)
            error = values(weight) - plain_one
            assert error.norm() < 0.15 * plain_one.norm()


def experts_of(decoder: Decoder) -> list[Experts]:
    """Of the layers that have some, in their order."""
    parts = (part for layer in decoder._layers for part in parts_of(layer))
    return [part._mixture._experts for part in parts if isinstance(part, SparseMlp)]


def test_weights_become_groups_while_they_are_loaded(tiny_model: Tiny, tmp_path: Path) -> None:
    def rounded(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group = 64 if weight.shape[1] == 64 else 32
        codes, scales = quantise_groups(weight, group)
        return {"weight": weight}, (codes.float() - 8) * scales.float().repeat_interleave(group, 1)

    folder = written(tiny_model("llama"), tmp_path / "same", rounded, {}, keeps=HEAD)
    assert answer(folder, quantization="int4") == answer(plain_of(folder))


@pytest.mark.parametrize("kind", ["awq", "q4_k", "gptq_8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_has_rows_of_8_bits_where_it_multiplies_bytes(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    weight, values = matrix(KINDS[kind], 48, 256, "cpu")
    weights, bias = Weights(dtype, torch.device("cpu")), torch.randn(48).to(dtype)
    product = serving(Grouped(weight, bias), weights)
    assert isinstance(product, WhenLoaded)
    weights.settle()
    assert product.loading is None
    assert isinstance(product.product, Int8Linear) == (dtype == torch.bfloat16 and multiplies_bytes())
    x = torch.randn(5, 256).to(dtype)
    expected = torch.nn.functional.linear(x.double(), values, bias.double())
    limit = 0.02 if dtype == torch.bfloat16 else 1e-5  # of the whole
    out = torch.empty(5, 48, dtype=dtype)
    assert product(x, out=out) is out
    for found, exact in (
        (out, expected),
        (product.parts(x), expected),
        (product.gated(x), silu_and_mul(expected)),
    ):
        assert (found.double() - exact).norm() < limit * exact.norm()


def test_rows_of_8_bits_have_another_fingerprint_than_the_groups(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU, and a CPU that multiplies floats, compute what the checkpoint stands for."""
    form = FORMS["awq"]
    folder = written(tiny_model("llama"), tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    prints = {}
    monkeypatch.setattr("engine.kernels.quantised.tiles.is_usable", lambda: False)  # tiles have none of these rows
    for multiplies in (False, True):
        monkeypatch.setattr(grouped, "multiplies_bytes", partial(bool, multiplies))
        caplog.clear()
        engine = Engine(EngineConfig(model=folder, dtype="bfloat16", cache=CacheConfig(num_blocks=8)))
        prints[multiplies] = engine.fingerprint
        told = [vars(record) for record in caplog.records if record.message == "engine.weights_changed"]
        assert [line["differing"] for line in told] == ([{ROUNDED: 8}] if multiplies else [])
    assert prints[False] == model_fingerprint(folder) != prints[True]


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_experts_that_stay_plain_have_another_fingerprint(quantization: str, tmp_path: Path) -> None:
    """Where kernels multiply them they are rounded."""
    folder, cache = MOE.build(tmp_path / "moe"), CacheConfig(num_blocks=8)
    config = EngineConfig(model=folder, quantization=quantization, dtype="float32", cache=cache)
    engine = Engine(config)
    assert set(engine._decoder.weights.differing) == {"experts left plain"}
    assert engine.fingerprint != model_fingerprint(config.model, [f"quantization={quantization}"])


def test_a_smaller_scale_is_taken_where_it_is_nearer() -> None:
    torch.manual_seed(3)
    matrix = torch.randn(32, 256)
    codes, scales = quantise_groups(matrix, 128)
    wide = scales.float().repeat_interleave(128, 1)
    error = ((codes.float() - 8) * wide - matrix).square().mean()
    furthest = matrix.unflatten(1, (2, 128)).abs().amax(2).repeat_interleave(128, 1) / 8
    plain = ((matrix / furthest).round().clamp(-8, 7) * furthest - matrix).square().mean()
    assert error < 0.9 * plain
    codes, scales = quantise_groups(torch.zeros(2, 128), 128)
    assert bool((codes == 8).all())
    assert bool((scales == 0).all())


REFUSED: list[tuple[dict[str, Any], str]] = [
    (AWQ | {"version": "gemv"}, "version = 'gemv' is not supported"),
    (AWQ | {"bits": 3}, "bits = 3 is not supported"),
    (AWQ | {"group_size": 48}, "group_size = 48 is not supported"),
    (GPTQ | {"bits": 5}, "bits = 5 is not supported; supported: 2, 3, 4, 8"),
    (GPTQ | {"dynamic": ["-:lm_head"]}, "dynamic must be an object"),
    (GPTQ | {"modules_in_block_to_quantize": 5}, "modules_in_block_to_quantize must hold lists of names"),
    (GPTQ | {"modules_in_block_to_quantize": "mlp.up_proj"}, "modules_in_block_to_quantize must hold lists of names"),
    (GPTQ | {"desc_act": "false"}, "desc_act = 'false' is not supported; supported: True, False"),
    (GPTQ | {"lm_head": "false"}, "lm_head = 'false' is not supported; supported: True, False"),
    (GPTQ | {"dynamic": {".*up": {"bits": 6}}}, "bits = 6 is not supported; supported: 2, 3, 4, 8"),
    (GPTQ | {"dynamic": {".*up": {"adapter": "x"}}}, "dynamic..*up. has adapter, which is not supported"),
    (GPTQ | {"dynamic": {"(a+)+b": {}}}, "a repeat within a repeat is not supported; name the modules"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
    (GPTQ | {"rotation": "hadamard"}, "rotation = hadamard is not supported"),
    (
        ours("pack-quantized", "group", num_bits=3, group_size=32)["quantization_config"],
        "num_bits = 3 is not supported",
    ),
    (ours("pack-quantized", "block", num_bits=4)["quantization_config"], "strategy = 'block' is not supported"),
    (ours("marlin-24", "group", num_bits=4)["quantization_config"], "format = 'marlin-24' is not supported"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    config: dict[str, Any], message: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    refused(config, message, tiny_model("llama"), tmp_path)


def test_orders_that_differ_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    """Products that are computed together read their inputs in one order."""
    form = FORMS["gptq, order of activations"]
    folder = written(tiny_model("llama"), tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="k_proj: its g_idx is not that of"):
        loaded(folder).weights.settle()
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.\d\.\S+: g_idx does not share the inputs out among groups of 32"):
        loaded(folder)


def test_words_that_no_codes_of_3_bits_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="2 words are no whole runs of 3"):
        unpacked(torch.zeros(4, 2, dtype=torch.int32), 3)
