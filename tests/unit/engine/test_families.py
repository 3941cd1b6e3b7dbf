"""Families read config.json: both generations of the format, what each makes of its fields, refusals that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.families import model_spec, read_model_spec
from engine.model.rope import cos_sin_table, inverse_frequencies
from engine.model.spec import RopeSpec, UnsupportedModelError

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def fields(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 4 wrote it."""
    return {
        "architectures": [architecture],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    } | changes


def test_absent_fields_have_the_formats_defaults() -> None:
    spec = model_spec(fields())
    assert spec.layers == (spec.layers[0],) * 4
    assert (spec.layers[0].mixer.num_kv_heads, spec.layers[0].mixer.head_dim, spec.dtype) == (4, 16, "bfloat16")
    assert spec.layers[0].mixer.rope == RopeSpec(theta=500000.0)
    assert not spec.has_tied_head


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_rope_is_read_in_the_old_and_the_new_form(changes: dict[str, Any]) -> None:
    assert model_spec(fields(**changes)).layers[0].mixer.rope == RopeSpec(theta=500000.0, linear_factor=4.0)


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 4.0}])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    ours = inverse_frequencies(model_spec(fields(rope_scaling=scaling)).layers[0].mixer.rope, head_dim=64)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def test_the_table_holds_cosines_then_sines() -> None:
    table = cos_sin_table(RopeSpec(theta=10.0), head_dim=4, num_positions=3)
    angles = torch.tensor([2.0, 2.0 / 10.0**0.5])
    torch.testing.assert_close(table[2], torch.cat((angles.cos(), angles.sin())))


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (0, 0, 0, 0)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (0, 0, 0, 0)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 8)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
def test_windows_are_those_of_the_family(architecture: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert model_spec(fields(architecture, **changes)).windows == windows


@pytest.mark.parametrize(
    ("architecture", "biases", "qk_norm"),
    [
        ("LlamaForCausalLM", (True, True, True), False),
        ("MistralForCausalLM", (False, False, False), False),
        ("Qwen2ForCausalLM", (True, False, False), False),
        ("Qwen3ForCausalLM", (True, True, False), True),
    ],
)
def test_biases_and_head_norms_are_those_of_the_family(
    architecture: str, biases: tuple[bool, ...], qk_norm: bool
) -> None:
    asked = model_spec(fields(architecture, attention_bias=True, mlp_bias=True)).layers[0]
    assert (asked.mixer.qkv_bias, asked.mixer.output_bias, asked.mlp.bias) == biases
    plain = model_spec(fields(architecture)).layers[0]
    assert (plain.mixer.qkv_bias, plain.mixer.output_bias) == (architecture == "Qwen2ForCausalLM", False)
    assert asked.mixer.qk_norm == plain.mixer.qk_norm == qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures = GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differs between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config \(unknown\)"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_spec(fields(**changes))


def test_a_folder_without_a_readable_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="is not JSON"):
        read_model_spec(tmp_path)
