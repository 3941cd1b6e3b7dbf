"""Floors against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.engine.floors import Ceilings, ModelCost, Work, decode_step, offline, prefill, upload
from benchmarks.environment import ROOT
from benchmarks.weights.drawn import DRAWN
from engine.families import model_spec
from tests.unit.engine.families import dense, experts, hybrids
from tests.unit.engine.families.case import Case

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}
H200 = Ceilings(bytes_per_s=4.16e12, read_bytes_per_s=4.3e12, flops_per_s=790e12, upload_bytes_per_s=55e9)


def llama_8b() -> ModelCost:
    return ModelCost.of(model_spec(LLAMA_8B), "bfloat16")


def test_llama_8b_has_as_many_parameters_as_its_card_says() -> None:
    assert llama_8b().stored_parameters == 8_030_261_248


def test_a_step_reads_no_embedding() -> None:
    assert llama_8b().weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert llama_8b().kv_bytes == 131_072


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 3.64), (64, 5.80), (256, 12.38)])
def test_a_decode_step_of_llama_8b_on_an_h200(batch: int, milliseconds: float) -> None:
    floor = decode_step(llama_8b(), batch=batch, context=1088).seconds(H200)
    assert 1e3 * floor == pytest.approx(milliseconds, abs=0.01)


def test_arithmetic_bounds_a_large_batch_with_little_context() -> None:
    work = decode_step(llama_8b(), batch=1024, context=1)
    assert work.seconds(H200) == work.flops / 790e12
    assert 1e3 * work.seconds(H200) == pytest.approx(1024 * 2 * 7.505e9 / 790e9, rel=0.001)


@pytest.mark.parametrize(("length", "milliseconds"), [(512, 9.1), (2048, 37.6), (8192, 167.0)])
def test_a_prompt_on_llama_8b(length: int, milliseconds: float) -> None:
    floor = prefill(llama_8b(), [length]).seconds(H200)
    assert 1e3 * floor == pytest.approx(milliseconds, rel=0.01)


def test_a_short_prompt_costs_at_least_the_weights() -> None:
    assert prefill(llama_8b(), [8]).seconds(H200) == pytest.approx(15.01e9 / 4.16e12, rel=0.001)


def test_an_offline_batch_is_its_prefill_and_its_decoding() -> None:
    cost = llama_8b()
    work = offline(cost, requests=10, prompt=100, output=3)
    parts = prefill(cost, [100] * 10)
    for context in (101, 102):
        parts += decode_step(cost, batch=10, context=context)
    assert work == parts


def test_bytes_and_arithmetic_hide_each_other() -> None:
    assert Work(4.16e12, 395e12).seconds(H200) == 1.0
    assert Work(2.08e12, 790e12).seconds(H200) == 1.0


def test_uploading_the_checkpoint() -> None:
    assert upload(llama_8b(), H200) == pytest.approx(16.06e9 / 55e9, rel=0.001)


def test_parameters_of_the_demo_model_are_counted_as_its_file_has_them() -> None:
    folder = ROOT / "demo"
    cost = ModelCost.of(model_spec(json.loads((folder / "config.json").read_bytes())), "float32")
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        stored = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 - not a mapping
    assert cost.stored_parameters == stored
    assert cost.read_parameters == stored  # tied: the head is the embedding


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "attention_bias": True},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_biases_and_head_norms_are_counted(changes: dict[str, Any]) -> None:
    import torch

    from engine.model.decoder import Decoder

    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    spec = model_spec(LLAMA_8B | small | {"num_attention_heads": 4, "num_key_value_heads": 2} | changes)
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=16)
    held = sum(place.tensor.numel() for places in decoder.weights.destinations.values() for place in places)
    assert ModelCost.of(spec, "float32").stored_parameters == held


def test_a_window_bounds_what_is_attended_to() -> None:
    cost = dataclasses.replace(llama_8b(), windows=((4, 0.25, 0.5), (math.inf, 0.75, 0.5)))
    assert cost.attended(3) == 3
    assert cost.attended(10) == 7
    assert cost.read_positions(10) == 8.5
    assert llama_8b().attended_by_prompt(10) == 50
    assert cost.attended_by_prompt(10) == 25 + (4 * 4 / 2 + 6 * 4) / 2


def test_a_step_reads_and_writes_each_sequences_state() -> None:
    hybrid = ModelCost.of(model_spec(DRAWN["qwen3.5-35b-a3b"]), "bfloat16")
    assert hybrid.state_bytes == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    one, two = (
        decode_step(dataclasses.replace(hybrid, num_experts=1, experts_a_token=1), batch=batch, context=8)
        for batch in (1, 2)
    )
    assert two.num_bytes - one.num_bytes == 2 * hybrid.state_bytes + 8 * hybrid.kv_bytes


def test_chosen_positions_are_read_and_the_keys_of_all() -> None:
    """DeepSeek-V3.2: 61 layers, 576 numbers of each chosen position and 128 of an indexer's key."""
    sparse = ModelCost.of(model_spec({"architectures": ["DeepseekV32ForCausalLM"]}), "bfloat16")
    dense = ModelCost.of(model_spec({"architectures": ["DeepseekV3ForCausalLM"]}), "bfloat16")
    of_indexers = 61 * (64 * (1536 * 128 + 7168) + (7168 + 2) * 128)
    assert sparse.stored_parameters - dense.stored_parameters == of_indexers
    assert sparse.read_bytes(2048) == dense.read_bytes(2048) == 2048 * 61 * 576 * 2
    assert sparse.read_bytes(32_768) == 61 * 2 * (2048 * 576 + 32_768 * 128)
    assert sparse.attention_work(2048) == dense.attention_work(2048)
    assert sparse.attention_work(32_768) == dense.attention_work(2048) + 61 * 2 * 64 * 128 * 32_768
    pairs = (32_768**2 - 2048**2) / 2
    assert sparse.attention_work_of_prompt(32_768) == (
        dense.attention_work_of_prompt(32_768) - pairs * dense.attention_flops + 2048 * (32_768 - 2048) * dense.attention_flops
        + 61 * 2 * 64 * 128 * pairs
    )  # fmt: skip
    whole = 61 * 2 * (576 + 128)
    assert ModelCost.of(model_spec({"architectures": ["DeepseekV32ForCausalLM"]}), "bfloat16", kv_bytes=whole) == sparse


def test_gemma_3n_has_as_many_parameters_as_its_card_says() -> None:
    """E2B: 1.91 billion beside its tables, with keys and values that ten layers have and nobody computes."""
    fields = {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10}
    fields |= {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20}
    cost = ModelCost.of(model_spec({"architectures": ["Gemma3nForCausalLM"], **fields}), "bfloat16")
    unused = 10 * 2 * (2 * 256) * 2048
    assert cost.layer_parameters + unused == pytest.approx(1.91e9, rel=0.003)
    assert cost.read_parameters == cost.stored_parameters - 262_144 * 30 * 256
    one = decode_step(cost, batch=1, context=1)
    assert one.num_bytes - cost.read_bytes(1) == 2 * cost.read_parameters


def test_layers_of_each_window_are_counted_by_what_they_keep() -> None:
    """Gemma 4: five layers with a window of 512 and heads of 256, one without and heads of 512."""
    fields = {"num_hidden_layers": 12, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 6}
    cost = ModelCost.of(model_spec({"architectures": ["Gemma4ForCausalLM"], **fields}), "bfloat16")
    assert cost.kv_bytes == 2 * 2 * 4 * (5 * 256 + 512)
    assert cost.read_bytes(10_000) == 2 * 2 * 4 * (5 * 256 * 512 + 512 * 10_000)
    assert cost.attention_work(10_000) == 4 * 8 * (10 * 256 * 512 + 2 * 512 * 10_000)


COUNTED = (
    "longcat_flash",
    "mimo_v2_flash",
    "afmoe",
    "deepseek_v32",
    "glm_moe_dsa",
    "laguna",
    "laguna, gates of numbers",
)
WITH_OWN_VALUES = [case for case in experts.CASES if case.name in COUNTED]
# Gemma 4 with vision has keys that are values, which this would count twice.
GEMMAS = [case for case in dense.CASES if case.name.startswith(("gemma3n", "gemma4")) and case.name != "gemma4-vision"]


@pytest.mark.parametrize("case", [*hybrids.CASES, *WITH_OWN_VALUES, *GEMMAS], ids=lambda case: case.name)
def test_layers_of_other_shapes_are_counted(case: Case) -> None:
    """All but a few norms."""
    import torch

    from engine.model.decoder import Decoder

    spec = model_spec(json.loads(case.config_object().to_json_string()) | {"architectures": [case.architecture()]})
    weights = Decoder(spec, dtype=torch.float32, device=torch.device("meta"), max_model_len=16).weights
    held = 0
    for ways in weights.ways:
        way = max(ways, key=len, default=frozenset[str]())
        held += sum(place.tensor.numel() for name in way for place in weights.destinations[name])
    assert ModelCost.of(spec, "float32").stored_parameters == pytest.approx(held, rel=1e-3)
