"""The Triton kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.gpu.waves import WITH_STATES
from tests.models import build_tiny_model
from tests.needs import needs
from tests.unit.engine.families import dense, experts
from tests.unit.kernels import (
    codes_checks,
    collective_checks,
    expert_checks,
    fp8_checks,
    group_checks,
    mla_checks,
    sampling_checks,
    share_checks,
    sparse_checks,
    switch_checks,
    triton_checks,
)
from tests.unit.kernels.interpreter import Interpreter

# What families need for a layer with a window beside one that sees everything.
COLUMNS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    }
}


LONG = {
    "rows",
    "blocks_of_a_row",
    "gptq",
    "channels",
    "channels_8",
    "w4_32",
    "w4_64",
    "q5_k",
    "q8_0",
    "nvfp4",
    "device_sampler",
    "filters",
    "filters_of_equal_scores",
    "random",
    "mistral",
    "qwen3",
    "qwen3_moe",
}  # up to a minute each: `make long`


def cases(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in names]


@pytest.mark.parametrize("name", triton_checks.CHECKS)
def test_triton_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("triton_checks", name)


@pytest.mark.parametrize("name", codes_checks.CHECKS)
def test_codes_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("codes_checks", name)


@pytest.mark.parametrize("name", mla_checks.CHECKS)
def test_latent_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("mla_checks", name)


@pytest.mark.parametrize("name", sparse_checks.CHECKS)
def test_sparse_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("sparse_checks", name)


@pytest.mark.parametrize("name", expert_checks.CHECKS)
def test_experts_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("expert_checks", name)


@pytest.mark.parametrize("name", cases(collective_checks.CHECKS))
def test_collective(interpreter: Interpreter, name: str) -> None:
    interpreter.check("collective_checks", name)


@pytest.mark.quick("heads", "latents and keys", "windows and states", "states beside two heads", "windows, stages")
@pytest.mark.parametrize("name", share_checks.CHECKS)
def test_a_share_of_blocks_is_moved(interpreter: Interpreter, name: str) -> None:
    interpreter.check("share_checks", name)


@pytest.mark.parametrize(
    "name",
    [
        "heads",
        *(pytest.param(name, marks=pytest.mark.long) for name in share_checks.IN_MESSAGES if name != "heads"),
    ],
)
def test_a_share_of_blocks_goes_through_messages(interpreter: Interpreter, name: str) -> None:
    needs("ucxx")
    interpreter.check("message_checks", name)


@pytest.mark.parametrize("name", switch_checks.CHECKS)
def test_switch(interpreter: Interpreter, name: str) -> None:
    interpreter.check("switch_checks", name)


@pytest.mark.parametrize("name", cases(sampling_checks.CHECKS))
def test_sampling_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("sampling_checks", name)


@pytest.mark.parametrize("name", cases(fp8_checks.CHECKS))
def test_fp8_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("fp8_checks", name)


@pytest.mark.parametrize("name", cases(group_checks.CHECKS))
def test_groups_kernel(interpreter: Interpreter, name: str) -> None:
    interpreter.check("group_checks", name)


@pytest.mark.parametrize("name", cases(["ragged", "windows", "head_sizes", "random"]))
def test_paged_prefill(interpreter: Interpreter, name: str) -> None:
    interpreter.check("prefill_checks", name)


@pytest.mark.parametrize("family", cases(["mistral", "qwen3", "qwen3_moe"]))
def test_a_pass_in_a_larger_graph(interpreter: Interpreter, family: str, tmp_path: Path) -> None:
    interpreter.check("graph_checks", str(build_tiny_model(tmp_path / family, family, **COLUMNS.get(family, {}))))


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gemma4-experts", "gemma4-small", "gpt_oss", "llama4-chunks"])
def test_a_pass_of_a_family_with_windows_in_a_larger_graph(interpreter: Interpreter, name: str, tmp_path: Path) -> None:
    (case,) = (case for case in (*dense.CASES, *experts.CASES) if case.name == name)
    interpreter.check("graph_checks", str(case.build(tmp_path)))


@pytest.mark.long
@pytest.mark.parametrize("kind", codes_checks.KINDS)
def test_a_pass_over_codes_in_a_larger_graph(interpreter: Interpreter, kind: str, tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "llama", "llama")
    interpreter.check("graph_checks", f"{folder}|{kind}")


@pytest.mark.long
def test_a_pass_of_sparse_attention_in_a_larger_graph(interpreter: Interpreter, tmp_path: Path) -> None:
    (case,) = (case for case in experts.CASES if case.name == "glm_moe_dsa")  # over all latents: Kimi-Linear below
    interpreter.check("graph_checks", str(case.build(tmp_path)))


@pytest.mark.long
@pytest.mark.parametrize("kind", codes_checks.KINDS)
def test_a_pass_over_codes_in_columns_in_a_larger_graph(interpreter: Interpreter, kind: str, tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "qwen3", "qwen3", **COLUMNS["qwen3"])
    interpreter.check("graph_checks", f"{folder}|{kind}")


@pytest.mark.long
@pytest.mark.parametrize("family", WITH_STATES)
def test_a_pass_with_states_in_a_larger_graph(interpreter: Interpreter, family: str, tmp_path: Path) -> None:
    interpreter.check("graph_checks", str(WITH_STATES[family].build(tmp_path)))
