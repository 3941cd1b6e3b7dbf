"""Families read config.json: both generations of the format, what each makes of its fields, refusals that name the field."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.families import model_spec, read_model_spec
from engine.model.rope import cos_sin_table, inverse_frequencies
from engine.spec.attention import QkNorm
from engine.spec.model import UnsupportedModelError
from engine.spec.scaling import LinearScaling, RopeSpec

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SCALINGS = [
    LLAMA3,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 20.0, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
    {"rope_type": "longrope", "original_max_position_embeddings": 64}
    | {"short_factor": [1.0 + index / 9 for index in range(32)], "long_factor": [1.0 + index for index in range(32)]},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
]
BASE = {"rope_theta": 500000.0, "rope_type": "default"}
BY_KIND = {"full_attention": {"rope_type": "default"}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def fields(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 4 wrote it."""
    return {
        "architectures": [architecture],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    } | changes


def test_absent_fields_have_the_formats_defaults() -> None:
    config = fields()
    del config["num_key_value_heads"]
    spec = model_spec(config)
    assert spec.layers == (spec.layers[0],) * 4
    assert (spec.layers[0].mixer.heads.num_kv_heads, spec.layers[0].mixer.heads.head_dim, spec.dtype) == (
        4,
        16,
        "bfloat16",
    )
    assert spec.layers[0].mixer.rope == RopeSpec(theta=500000.0)
    assert not spec.head.is_tied


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_rope_is_read_in_the_old_and_the_new_form(changes: dict[str, Any]) -> None:
    rope = model_spec(fields(**changes)).layers[0].mixer.rope
    assert rope == RopeSpec(theta=500000.0, scaling=LinearScaling(factor=4.0))


@pytest.mark.parametrize(
    "scaling", [YARN | {"rope_theta": 1e6}, {"type": "linear", "factor": 4.0, "rope_theta": 1e6}, {}]
)
def test_of_both_forms_the_one_that_transformers_takes_is_read(scaling: dict[str, Any]) -> None:
    both = {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "rope_scaling": scaling}
    theirs = transformers.LlamaConfig(max_position_embeddings=2048, **copy.deepcopy(both)).rope_parameters
    written = model_spec(fields(max_position_embeddings=2048, rope_theta=None, **both))
    assert written == model_spec(fields(max_position_embeddings=2048, rope_theta=None, rope_parameters=theirs))


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=100)
    rope = model_spec(fields(rope_scaling=scaling, max_position_embeddings=2048)).layers[0].mixer.rope
    assert rope is not None
    ours = inverse_frequencies(rope, head_dim=64, num_positions=100)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
    first = cos_sin_table(rope, head_dim=64, num_positions=2)[0, : len(expected)]
    torch.testing.assert_close(first, torch.full_like(first, factor))


def test_each_pair_has_a_factor_of_longrope() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}
    rope = model_spec(fields(rope_scaling=scaling)).layers[0].mixer.rope
    with pytest.raises(UnsupportedModelError, match=r"has 7 factors .*, and a head 8 pairs to rotate: each needs one"):
        inverse_frequencies(rope, head_dim=16, num_positions=100)


def test_the_table_holds_cosines_then_sines() -> None:
    table = cos_sin_table(RopeSpec(theta=10.0), head_dim=4, num_positions=3)
    angles = torch.tensor([2.0, 2.0 / 10.0**0.5])
    torch.testing.assert_close(table[2], torch.cat((angles.cos(), angles.sin())))


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
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
    ("architecture", "read", "biases", "qk_norm"),
    [
        ("LlamaForCausalLM", ("attention_bias", "mlp_bias"), (True, True, True), None),
        ("MistralForCausalLM", (), (False, False, False), None),
        ("Qwen2ForCausalLM", (), (True, False, False), None),
        ("Qwen3ForCausalLM", ("attention_bias",), (True, True, False), QkNorm()),
    ],
)
def test_biases_and_head_norms_are_those_of_the_family(
    architecture: str, read: tuple[str, ...], biases: tuple[bool, ...], qk_norm: QkNorm | None
) -> None:
    asked = model_spec(fields(architecture, **dict.fromkeys(read, True))).layers[0]
    assert (asked.mixer.projections.qkv_bias, asked.mixer.projections.output_bias, asked.mlp.bias) == biases
    plain = model_spec(fields(architecture)).layers[0]
    assert (plain.mixer.projections.qkv_bias, plain.mixer.projections.output_bias) == (
        architecture == "Qwen2ForCausalLM",
        False,
    )
    assert asked.mixer.qk_norm == plain.mixer.qk_norm == qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "config.json: GPT2LMHeadModel is not served"),
        ({"architectures": None}, "architectures"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type = 'mrope'"),
        ({"rope_parameters": BASE, "rope_scaling": {"type": "weird", "factor": 2}}, "rope_scaling.rope_type = 'weird'"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}, "lacks its rope_theta = 1000000.0: write all"),
        ({"rope_parameters": BY_KIND, "rope_scaling": YARN}, "rope_scaling beside rope_parameters that differ between"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "alpha": 2}}, "rope_scaling of type 'linear' has alpha"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        (
            {"rope_scaling": SCALINGS[6] | {"long_factor": [1.0, 0.0]}},
            "long_factor of type 'longrope' must hold positive",
        ),
        (
            {"rope_scaling": SCALINGS[5] | {"original_max_position_embeddings": 10**30}},
            "embeddings = 10+ is no context's",
        ),
        ({"rope_theta": 1.0}, "rotates 1.0 of a head by 1.0: at most all of it, by a number above 1"),
        ({"rope_parameters": BY_KIND}, "rope_parameters differs between layers"),
        ({"sliding_window": 8}, "sliding_window = 8 is not supported by this family"),
        ({"attn_logit_softcapping": 50.0, "new_in_6": {"a": 1}}, "attn_logit_softcapping = 50.0, new_in_6 = {'a': 1}"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "quanto"}}, r"quantization_config \(quanto\)"),
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


def test_each_thing_that_a_layer_keeps_has_a_place_of_its_own() -> None:
    """An indexer's key may be as large as the rotated one: then they are two of one part."""
    sizes = {"qk_rope_head_dim": 16, "index_head_dim": 16, "moe_intermediate_size": 8}
    spec = model_spec(fields("GlmMoeDsaForCausalLM", **sizes, indexer_types=["full", "shared", "full", "shared"]))
    for codes in ("fp8", "int8", None):
        layers = tuple(layer.with_attention(codes=codes) for layer in spec.layers)
        coded = replace(spec, layers=layers)
        places = [place for own in coded.places for place in own]
        assert len(set(places)) == len(places) == sum(coded.kept.values())
        assert {(part, number) for part, count in enumerate(coded.kept.values()) for number in range(count)} == set(
            places
        )


def test_a_folder_without_a_readable_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="is not JSON"):
        read_model_spec(tmp_path)
