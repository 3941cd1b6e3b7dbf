# mypy: allow-untyped-calls
"""Checkpoints in 8-bit floats answer as the plain checkpoints of the same values do, in each form that makers write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.fingerprint import model_fingerprint
from engine.checkpoint.safetensors import CheckpointError
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.families.quantised import METHODS, ONLINE, compressed_tensors, modelopt
from engine.formats.fp8 import Fp8, Fp8Linear, Scales
from engine.formats.product import LinearSpec
from engine.kernels.quantised.fp8 import Fp8Rows, Rounding, quantise_rows
from engine.spec.model import UnsupportedModelError
from engine.weights.loader import load_weights
from engine.weights.parameters import Shard, Weights
from tests.models import build_tiny_model
from tests.unit.engine.families.experts import CASES
from tests.unit.engine.formats.checkpoints import (
    FP8,
    Tensors,
    compressed,
    fp8_block,
    fp8_row,
    fp8_tensor,
    plain_of,
    refused,
    written,
)
from tests.unit.engine.formats.loading import PROMPT, Form, Tiny, answer, loaded, single

NATIVE = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def limited_rows(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, same = fp8_row(module, weight)
    return {**parts, "input_scale_ub": torch.tensor([1200.0])}, same


FORMS = {
    "compressed, tensor": Form("llama", fp8_tensor, compressed("tensor")),
    "compressed, channel, ignored": Form(
        "qwen2",
        fp8_row,
        compressed("channel", ignore=("lm_head", "re:.*layers\\.0\\.mlp.*", "model.layers.1.self_attn.k_proj")),
        keeps=("lm_head", "layers.0.mlp", "layers.1.self_attn.k_proj"),
    ),
    "compressed, block": Form(
        "llama", fp8_block(16, 32, "weight_scale"), compressed("block", block_structure=[16, 32])
    ),
    "rows, as Meta wrote them": Form(
        "llama",
        limited_rows,
        {
            "quantization_config": {
                "quant_method": "fbgemm_fp8",
                "activation_scale_ub": 1200.0,
                "modules_to_not_convert": ["model.layers.0.mlp.down_proj", "lm_head"],
            }
        },
        keeps=("lm_head", "layers.0.mlp.down_proj"),
    ),
    "native, tensor, static": Form(
        "qwen3",
        fp8_tensor,
        {"quantization_config": NATIVE | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}},
        keeps=("lm_head",),
    ),
    "native, blocks, ragged": Form(
        "llama",
        fp8_block(64, 40),
        {"quantization_config": NATIVE | {"weight_block_size": [64, 40], "modules_to_not_convert": ["o_proj"]}},
        keeps=("lm_head", "o_proj"),
    ),
    "native, blocks, aligned": Form(
        "llama",
        fp8_block(32, 64),
        {"quantization_config": NATIVE | {"weight_block_size": [32, 64]}},
        keeps=("lm_head",),
    ),
    "native, blocks, experts": Form(
        "qwen3_moe",
        fp8_block(128, 128),
        {"quantization_config": NATIVE | {"weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate"]}},
        keeps=("lm_head", "mlp.gate."),
    ),
    "modelopt": Form(
        "llama",
        fp8_tensor,
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]}},
        keeps=("lm_head",),
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_quantised_checkpoint_answers_as_what_it_stands_for(
    form: Form, has_kernels: bool, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`has_kernels`: products read the stored bits, here with the kernels' plain versions."""
    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: has_kernels)
    source = single(tiny_model, form.family, tmp_path)
    folder = written(source, tmp_path / "quantised", form.store, form.config, keeps=form.keeps)
    said = answer(folder)
    assert said == answer(plain_of(folder))
    assert len(set(said)) > 3, "a model that repeats itself shows nothing"


def test_an_indexer_is_quantised_with_its_layer(tmp_path: Path) -> None:
    """As DeepSeek-V3.2 is published: all but the weights of its heads, the router and the head, in blocks."""
    (case,) = (case for case in CASES if case.name == "deepseek_v32")
    kept = ("lm_head", "mlp.gate.", "indexer.weights_proj")
    config = {"quantization_config": NATIVE | {"weight_block_size": [16, 32], "scale_fmt": "ue8m0"}}
    folder = written(case.build(tmp_path / "plain"), tmp_path / "same", fp8_block(16, 32), config, keeps=kept)
    stored = load_file(folder / "model.safetensors")
    for name in ("wq_b", "wk"):
        assert f"model.layers.1.self_attn.indexer.{name}.weight_scale_inv" in stored
    said = answer(folder)
    assert said == answer(plain_of(folder))
    assert len(set(said)) > 3, "a model that repeats itself shows nothing"


def test_a_scheme_for_keys_and_values_is_known(tiny_model: Tiny, tmp_path: Path) -> None:
    fields = json.loads((tiny_model("llama") / "config.json").read_text())
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = NATIVE | {"kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    assert read_model_spec(tmp_path).quantization.kv_cache == "fp8"


def test_experts_are_quantised_while_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: True)

    def rounded(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        found = quantise_rows(weight)
        return {"weight": weight}, found.values.float() * found.scale if weight.shape[1] % 64 == 0 else weight

    source = build_tiny_model(tmp_path / "plain", "qwen3_moe", moe_intermediate_size=64)
    together = load_file(source / "model.safetensors")
    for name in [name for name in together if ".experts." in name]:
        rows = together.pop(name)
        for expert, matrix in enumerate(rows):
            halves = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            parts = dict(halves) if "gate_up" in name else {"down_proj": matrix}
            layer = name.rpartition(".")[0]
            together |= {f"{layer}.{expert}.{kind}.weight": part.clone() for kind, part in parts.items()}
    save_file(together, source / "model.safetensors")
    folder = written(source, tmp_path / "same", rounded, {}, keeps=("lm_head", "mlp.gate."))
    assert answer(folder, quantization="fp8") == answer(plain_of(folder))


def test_rows_that_norms_and_activations_round_reach_their_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rounding that changes nothing, many rows are answered as few are."""
    source = build_tiny_model(tmp_path / "wide", "llama", intermediate_size=128)
    folder = written(
        source, tmp_path / "quantised", fp8_row, compressed("channel", ignore=("lm_head",)), keeps=("lm_head",)
    )
    calls = []

    def unrounded(x: torch.Tensor, rounding: Rounding) -> Fp8Rows:
        calls.append(x.shape)
        return Fp8Rows(x, torch.ones(len(x), 1), x.dtype)

    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: True)
    monkeypatch.setattr("engine.kernels.quantised.fp8.FEW_ROWS", 20)
    monkeypatch.setattr("engine.formats.fp8.FEW_ROWS", 20)
    monkeypatch.setattr(quantise_rows, "reference", unrounded)
    assert answer(folder) == answer(plain_of(folder))
    num_rows = len(PROMPT)
    assert calls == [(num_rows, 64), (num_rows, 64), (num_rows, 128), (num_rows, 64)], "two norms and an activation"


@pytest.mark.parametrize("shard", [Shard.INPUTS, Shard.OUTPUTS])
@pytest.mark.parametrize("sizes", [(256, 512), (256, 384), (192, 256)])
def test_ranks_share_blocks(
    sizes: tuple[int, int], shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block is on two ranks."""
    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: True)
    generator, (rows, inputs) = torch.Generator().manual_seed(1), sizes
    weight = torch.randn(rows, inputs, generator=generator).to(FP8)
    scale = torch.rand(-(-rows // 128), inputs // 128, generator=generator) + 0.1
    save_file({"o.weight": weight, "o.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    matrix = weight.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    for rank in (0, 1):
        weights = Weights(torch.float32, torch.device("cpu"), rank=rank, size=2)
        spec = LinearSpec(inputs=inputs, outputs={"o": rows}, bias=False, shard=shard)
        linear = Fp8(scales=Scales.BLOCK).linear(spec, weights, under="")
        load_weights(weights, tmp_path)
        weights.settle()
        share = matrix.chunk(2, 1 if shard is Shard.INPUTS else 0)[rank]
        found = linear.matrix.plain() if isinstance(linear, Fp8Linear) else linear(torch.eye(share.shape[1])).T
        torch.testing.assert_close(found.float(), share)


@pytest.mark.parametrize(("inputs", "has_kernel"), [(256, True), (192, False)])
def test_inputs_that_end_within_a_block_become_plain(
    inputs: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels look for a row's scales where whole blocks would have put them. The 10,944 of DeepSeek-V2-Lite are none."""
    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: True)
    spec = LinearSpec(inputs=inputs, outputs={"m": 96}, bias=False, shard=Shard.NONE)
    product = Fp8(scales=Scales.BLOCK).linear(spec, Weights(torch.bfloat16, torch.device("cpu")), under="")
    assert isinstance(product, Fp8Linear) == has_kernel


def test_what_modelopt_writes_beside_config_json_counts(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = written(tiny_model("llama"), tmp_path / "quantised", fp8_tensor, {}, keeps=("lm_head",))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    assert answer(folder) == answer(plain_of(folder))


@pytest.mark.parametrize("beside", [{"quantization": [1]}, {"quantization": "FP8"}, [], {}])
def test_what_is_no_object_beside_config_json_is_refused(beside: Any, tiny_model: Tiny, tmp_path: Path) -> None:
    shutil.copy(tiny_model("llama") / "config.json", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json can't be read"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_weights_are_quantised_while_they_are_loaded(
    has_kernels: bool, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: has_kernels)

    def rounded(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        found = quantise_rows(weight)
        return {"weight": weight}, found.values.float() * found.scale

    folder = written(
        tiny_model("llama"), tmp_path / "same", rounded, {}, keeps=("lm_head", "down_proj")
    )  # its 96 inputs don't suit
    assert answer(folder, quantization="fp8") == answer(plain_of(folder))


def test_settings_that_change_keys_and_values_change_the_fingerprint(tiny_model: Tiny) -> None:
    engines = [
        Engine(EngineConfig(model=tiny_model("llama"), quantization=name, cache=CacheConfig(num_blocks=8)))
        for name in ("auto", "fp8")
    ]
    assert engines[0].fingerprint == model_fingerprint(tiny_model("llama"))
    assert engines[0].fingerprint != engines[1].fingerprint


def test_a_stage_is_freed_as_soon_as_it_was_taken(tiny_model: Tiny) -> None:
    """However many matrices are quantised while loading, few of them are in memory at once."""
    import engine.weights.stage as stage

    alive, most = set[int](), 0

    class Counted(stage.Stage):
        def tensor(self, kind: str, plan: torch.Tensor) -> torch.Tensor:
            nonlocal most
            found = super().tensor(kind, plan)
            alive.add(id(self))
            most = max(most, len(alive))
            return found

        def arrived(self, count: int) -> None:
            super().arrived(count)
            if not self._tensors:
                alive.discard(id(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.weights.parameters.Stage", Counted)
        patch.setattr("engine.weights.loader.CPU_BUFFER_BYTES", 4096)
        patch.setattr("engine.weights.loader.THREADS", 1)
        loaded(tiny_model("llama"), quantization="fp8")
    assert 0 < most <= 2
    assert not alive


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
    ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation = hadamard is not supported"),
    ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers must be a list of names"),
    ({"quant_method": "modelopt", "quant_algo": "W1A1"}, "quant_algo = 'W1A1' is not supported"),
    (compressed("token")["quantization_config"], "strategy = 'token' is not supported"),
    (compressed("tensor", symmetric=False)["quantization_config"], "symmetric = False is not supported"),
    (
        compressed("tensor", type="int", symmetric="false")["quantization_config"] | {"format": "pack-quantized"},
        "symmetric = 'false' is not supported",
    ),
    (compressed("tensor", actorder="group")["quantization_config"], "actorder of config_groups is not supported"),
    (compressed("tensor")["quantization_config"] | {"transform_config": {"a": 1}}, "transform_config is not supported"),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo = 'NVFP4'",
    ),
    ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 4}}, "num_bits = 4 is not supported"),
    (compressed("tensor", ignore=("re:(",))["quantization_config"], "is no regular expression"),
    (compressed("tensor", ignore=("re:" + "a" * 600,))["quantization_config"], "has 600 letters, at most 512 are read"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_nobody_reads_is_refused_by_name(
    config: dict[str, Any], message: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    refused(config, message, tiny_model("llama"), tmp_path)


def test_the_page_names_every_format() -> None:
    text = (Path(__file__).parents[4] / "docs/quantisation.md").read_text()
    for name in (*METHODS, *ONLINE, *compressed_tensors.FORMATS, *modelopt.ALGORITHMS):
        assert f"`{name}`" in text, name


def test_a_quantised_checkpoint_is_not_quantised_again(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = written(tiny_model("llama"), tmp_path / "quantised", fp8_tensor, compressed("tensor"))
    with pytest.raises(UnsupportedModelError, match=r"are quantised \(compressed-tensors float-quantized\): use auto"):
        read_model_spec(folder, quantization="fp8")
    with pytest.raises(UnsupportedModelError, match="quantization = 'fp7' is not supported; supported: auto, fp8"):
        read_model_spec(folder, quantization="fp7")


def test_files_that_the_config_does_not_describe_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = written(tiny_model("llama"), tmp_path / "quantised", fp8_tensor, compressed("tensor"))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name].to(torch.bfloat16)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=f"{name} holds BF16, quantization_config in config.json asks for float8_e4m3fn"
    ):
        loaded(folder)
    save_file(weights | {name: torch.zeros(64, 96, dtype=torch.int8)}, plain_of(folder) / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} holds I8: quantised weights that quantization_config"):
        loaded(plain_of(folder))
