"""No field of a config.json is skipped: what it leaves out is transformers' default, what it has is computed or refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import transformers

from engine.families import model_spec
from engine.families.reading.fields import HARMLESS
from engine.spec.model import ModelSpec, UnsupportedModelError
from tests.unit.engine.families import dense, experts, hybrids, vision, wrapped
from tests.unit.engine.families.case import Case

CASES = [*dense.CASES, *experts.CASES, *hybrids.CASES, *vision.CASES]
# They change nothing in these families: transformers does not read them either, or another field of the same config decides.
OTHERS = {
    "partial_rotary_factor",
    "max_window_layers",
    "layer_types",
    "sliding_window_pattern",
    "no_rope_layer_interval",
    "use_bidirectional_attention",
}
OF_GEMMA_4 = {"vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size"}  # all are off
OF_GEMMA_4 |= {"use_double_wide_mlp"}  # no layer borrows
# Another field of the case decides, or they only cut the model's length.
OF_LLAMA_4 = {"moe_layers", "interleave_moe_layer_step", "no_rope_layer_interval"}
OF_LATENTS = {"num_key_value_heads", "head_dim", "qk_head_dim"}  # they follow from other sizes
# Windows are off; where a checkpoint has other parts, its outer field ties the head.
OF_VISION = {"sliding_window", "tie_word_embeddings"}
OF_GEMMA_3N = {"altup_coef_clip"}  # it is for training
OF_MAMBA = {"mamba_chunk_size"}  # how much is computed at once
# The size is said; nothing is normed.
OF_FALCON_H1 = {*OF_MAMBA, "num_logits_to_keep", "mamba_expand", "mamba_norm_before_gate"}
MAMBA = {f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size")}
MAMBA |= {"mamba_conv_bias", "mamba_proj_bias"}
# What training began with, how work is cut, and layers that predict further tokens.
OF_NEMOTRON_H = {
    "num_logits_to_keep",
    "use_mamba_kernels",
    "expand",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
}
OF_NEMOTRON_H |= {"chunk_size", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type"}
OF_NEMOTRON_H |= {"rescale_prenorm_residual"}
OF_JAMBA = {"use_mamba_kernels", "use_mambapy", "use_associative_scan"}  # how a scan is computed
OF_STARTS = {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
OF_FAMILIES = {
    **{case.name: OF_VISION for case in wrapped.CASES},
    "internvl": {*OF_VISION, "intermediate_size"},  # all its layers have experts
    "lfm2_vl": {*OF_VISION, "intermediate_size", "full_attn_idxs"},  # other fields say them
    "qwen2_vl": OF_VISION,
    "qwen2_5_vl": OF_VISION,
    "qwen3_vl": OF_VISION,
    "qwen2_5_omni": OF_VISION,
    "qwen3_omni": {*OF_VISION, "intermediate_size"},  # all its layers have experts
    "hy_v3": {"enable_moe_fp32_combine"},  # when a sum is rounded
    "mistral4": OF_LATENTS,
    "mistral4-vision": {*OF_LATENTS, *OF_VISION},
    "axk1": OF_LATENTS,
    # Another field has the rotation; a softmax of the chosen adds up to 1.
    "cohere2_moe": {"rope_theta", "rope_scaling", "norm_topk_prob"},
    "cohere2_moe-sigmoid": {"rope_theta", "rope_scaling", "layer_norm_eps"},
    "afmoe": {"global_attn_every_n_layers"},
    "phimoe": {"input_jitter_noise"},  # of training
    "phimoe-short": {"input_jitter_noise"},
    "qwen3_vl_moe": {*OF_VISION, "mlp_only_layers"},
    "glm4v": OF_VISION,
    "glm4v_moe": OF_VISION,
    "glm46v": OF_VISION,
    "kimi_k25": {*OF_VISION, *OF_LATENTS},
    "gemma4-unified": {"use_double_wide_mlp", "vocab_size_per_layer_input"},
    "exaone_moe": {"first_k_dense_replace"},
    "solar_open": {"intermediate_size"},  # all its layers have experts
    "youtu": {*OF_LATENTS, "embedding_initializer_range"},
    "glm4_moe_lite": {*OF_LATENTS, "first_k_dense_replace"},
    "deepseek_v2": OF_LATENTS,
    "deepseek_v3": OF_LATENTS,
    "deepseek_v32": {*OF_LATENTS, "first_k_dense_replace"},  # mlp_layer_types say it
    "deepseek_v32, most contexts attended to whole": {*OF_LATENTS, "first_k_dense_replace"},
    "glm_moe_dsa": {*OF_LATENTS, "first_k_dense_replace"},
    "longcat_flash": {*OF_LATENTS, "num_hidden_layers"},  # transformers sets it
    "longcat_flash, no expert does nothing": {*OF_LATENTS, "num_hidden_layers"},
    "ernie4_5_moe": {"moe_layer_end_index"},  # beyond the last layer
    "llama4": OF_LLAMA_4,
    "llama4-chunks": {*OF_LLAMA_4, "intermediate_size_mlp", "attn_temperature_tuning", "floor_scale", "attn_scale"},
    # All its layers have experts and rotated positions.
    "llama4-vision": {
        *OF_LLAMA_4,
        *("intermediate_size_mlp", "attn_temperature_tuning", "floor_scale", "attn_scale", "tie_word_embeddings"),
    },
    "laguna": {"num_attention_heads"},  # each layer says its own
    "laguna, gates of numbers": {"num_attention_heads"},
    "qwen2_moe": {"sliding_window"},
    "qwen3_moe": {"sliding_window", "mlp_only_layers"},
    "qwen3_5 of a checkpoint with vision": {"tie_word_embeddings"},
    "qwen3_5_moe": {"intermediate_size"},  # all its layers have experts
    "qwen3_5_moe of a checkpoint with vision": {"intermediate_size", "tie_word_embeddings"},
    "qwen3_next": {"intermediate_size", "mlp_only_layers"},
    "qwen3_next, a state in the last layer": {"intermediate_size", "mlp_only_layers"},
    "lfm2": {"full_attn_idxs"},  # layer_types say it
    "lfm2, with biases": {"full_attn_idxs", "block_multiple_of", "block_ffn_dim_multiplier"},
    "kimi_linear": OF_LATENTS,
    "kimi_linear, queries through fewer features": OF_LATENTS,
    "olmo_hybrid": {"rope_parameters", *OF_STARTS},  # nothing is rotated
    "olmo_hybrid, rotated, weaker": OF_STARTS,
    "cohere2": {"head_dim"},
    "gemma3-vision": {"tie_word_embeddings"},
    "gemma4": OF_GEMMA_4,
    "gemma4-experts": {"vocab_size_per_layer_input", "use_double_wide_mlp"},
    "gemma4-small": {"num_experts", "top_k_experts", "moe_intermediate_size"},
    "gemma4-vision": {*OF_GEMMA_4, "tie_word_embeddings"},
    "gemma3n": OF_GEMMA_3N,
    "gemma3n, other streams": OF_GEMMA_3N,
    "gemma3n beside vision": {*OF_GEMMA_3N, "tie_word_embeddings"},
    "minicpm3": OF_LATENTS,
    "minicpm3, longrope": OF_LATENTS,
    "minicpm3, long": OF_LATENTS,
    "mistral3-vision": {"tie_word_embeddings"},
    "granite4": OF_MAMBA,
    "granite4, a state in the last layer": {*OF_MAMBA, "intermediate_size", "num_experts_per_tok"},
    "granite4 without states": {"intermediate_size", "num_experts_per_tok", "time_step_limit", *MAMBA},
    "falcon_h1": OF_FALCON_H1,
    "falcon_h1, normed before the gate": OF_FALCON_H1,
    "falcon_h1, normed behind the gate": {*OF_MAMBA, "num_logits_to_keep"},
    "bamba": {*OF_MAMBA, "z_loss_coefficient", "num_logits_to_keep"},
    "nemotron_h": OF_NEMOTRON_H,
    "nemotron_h, a state in the last mixer": OF_NEMOTRON_H,
    "jamba": OF_JAMBA,
    "jamba, without experts": {*OF_JAMBA, "num_experts_per_tok", "expert_layer_period"},
    "phi4_multimodal": {"original_max_position_embeddings", "vision_config", "audio_config"},
    "phi3": {"original_max_position_embeddings"},
    "qwen2": {"sliding_window"},
    "qwen3": {"sliding_window"},
    "smollm3": {"sliding_window", "use_sliding_window"},
}
# Transformers has defaults of these that make no model: no experts chosen, no layer that attends.
NO_MODEL = {"BambaConfig", "DeepseekV2Config", "Dots1Config", "GraniteMoeHybridConfig", "Lfm2MoeConfig"}


def config_of(case: Case) -> dict[str, Any]:
    """What config.json would say with every field in it."""
    fields = case.config_object().to_dict()
    return {**fields, "architectures": [case.architecture()]}


def read(fields: dict[str, Any]) -> ModelSpec | str:
    try:
        return model_spec(fields)
    except UnsupportedModelError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_left_out_has_transformers_default(case: Case) -> None:
    if case.text_in:
        pytest.skip("its text part is another case's")
    whole = getattr(transformers, case.config)().to_dict() | {"architectures": [case.architecture()]}
    expected, found = read(whole), read({"architectures": [case.architecture()]})
    if isinstance(expected, str):
        assert case.config in NO_MODEL
        assert found == expected
    elif isinstance(found, str):  # published configs have it
        assert case in experts.CASES
        assert "must be a positive integer" in found
    else:  # of weights that are not computed an unforeseen one is refused by name
        assert replace(found, stored=expected.stored) == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_field_matters_or_is_refused(case: Case) -> None:
    fields = config_of(case)
    inner = fields["text_config"] if case.text_in else fields
    expected = read(fields)
    assert isinstance(expected, ModelSpec), expected
    skipped = []
    for name, value in inner.items():
        if name in HARMLESS or name in OTHERS or name in OF_FAMILIES.get(case.name, ()) or name.startswith("_"):
            continue
        changed = inner | {name: another(value)}
        if read(fields | {"text_config": changed} if case.text_in else changed) == expected:
            skipped.append(name)
    assert not skipped


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_unknown_field_is_refused_by_name(case: Case) -> None:
    assert "gate_of_attention = 2 is not supported by this family" in str(
        read({**config_of(case), "gate_of_attention": 2})
    )


@pytest.mark.quick(of=lambda case: case.config)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_of_other_types_are_refused_by_name(case: Case) -> None:
    fields = config_of(case)
    inner = fields["text_config"] if case.text_in else fields
    for name in inner:
        for value in (None, -1, 0, "x", [1], {"a": 1}, math.inf, math.nan, 1.5, 10**30):
            changed = inner | {name: value}
            read(fields | {"text_config": changed} if case.text_in else changed)  # raises nothing else, and soon


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**30),
        ("num_key_value_heads", -1),
        ("head_dim", -16),
        ("sliding_window", -1),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", math.nan),
        ("tie_word_embeddings", "false"),
        ("hidden_act", ["silu"]),
        ("rope_scaling", [4.0]),
        ("rope_scaling", {"rope_type": ["linear"]}),
        ("architectures", "MistralForCausalLM"),
        ("architectures", [["MistralForCausalLM"]]),
        ("quantization_config", "fp8"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(name: str, value: object) -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    with pytest.raises(UnsupportedModelError, match=name):
        model_spec({"architectures": ["MistralForCausalLM"], **config, name: value})


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("GraniteSWAForCausalLM", "layer_rope_theta", [10_000.0] * 23 + [-1.0]),
        ("GraniteSWAForCausalLM", "layer_rope_theta", ["10000"] * 24),
        ("PhimoeForCausalLM", "router_jitter_noise", -0.01),
    ],
)
def test_a_value_that_makes_no_numbers_is_refused(architecture: str, name: str, value: object) -> None:
    assert isinstance(read({"architectures": [architecture]}), ModelSpec)
    assert f"config.json: {name}" in str(read({"architectures": [architecture], name: value}))


def test_mimo_as_it_was_published_is_read() -> None:
    """Its own names of fields; sizes are the defaults."""
    pattern = [int(layer > 0 and layer % 6 != 5) for layer in range(48)]
    published = {"architectures": ["MiMoV2FlashForCausalLM"], "hybrid_layer_pattern": pattern}
    published |= {"moe_layer_freq": [0] + [1] * 47, "layernorm_epsilon": 1e-5, "routed_scaling_factor": None}
    published |= {
        "swa_num_key_value_heads": 8,
        "swa_num_attention_heads": 64,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
    }
    published |= {
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334,
        "rope_scaling": None,
    }
    published |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None}
    published |= {
        "sliding_window_size": 128,
        "attention_chunk_size": 128,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    theirs = transformers.MiMoV2FlashConfig().to_dict() | {"architectures": published["architectures"]}
    assert read(published) == read(theirs)
    for name in (
        "swa_num_key_value_heads",
        "swa_rope_theta",
        "moe_layer_freq",
        "add_full_attention_sink_bias",
        "swa_v_head_dim",
    ):
        assert read({**published, name: another(published[name])}) != read(theirs)


def test_a_text_model_beside_its_vision_is_read() -> None:
    """As Qwen2.5-VL's checkpoints have it: no `text_config`, and a rotation by sections."""
    (case,) = (case for case in CASES if case.name == "qwen2_5_vl")
    config = config_of(case)
    flat = {**config["text_config"], "vision_config": {}, "image_token_id": 7, "architectures": config["architectures"]}
    flat |= {"rope_parameters": None, "rope_theta": 1e6, "tie_word_embeddings": False}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    assert read(flat) == read({**config, "tie_word_embeddings": False})
    assert "rope_type = 'mrope' is not supported" in str(read({**flat, "architectures": ["Qwen2ForCausalLM"]}))


def test_lfm2_says_some_things_twice_and_they_agree() -> None:
    """As its first checkpoints have it: the width of the MLP before it is cut to two thirds, and layers by their numbers."""
    common = {"architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16, "rope_theta": 1e6}
    twice = {"block_dim": 2048, "conv_dim": 2048, "num_heads": 32, "theta": 1e6, "block_use_swiglu": True}
    first = common | twice | {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_ff_dim": 12288, "tie_embedding": True}
    kinds = ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]
    exact = {"intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "layer_types": kinds}
    assert read(first) == read(common | exact)
    assert "conv_dim = 1024 is not supported; supported: 2048" in str(read(first | {"conv_dim": 1024}))
    assert "conv_L_cache = 1 is not supported" in str(read(first | {"conv_L_cache": 1}))


def test_jamba_says_in_three_ways_which_layers_attend() -> None:
    (case,) = (case for case in CASES if case.name == "jamba")
    config, kinds = config_of(case), ["mamba", "attention", "mamba", "mamba", "attention"]
    said = {"layers_block_type": kinds, "sliding_window": None, "num_logits_to_keep": 1}
    assert isinstance(expected := read(config), ModelSpec)
    assert read(config | said) == expected
    for wrong, complaint in (
        ({"layers_block_type": kinds[::-1]}, "layers_block_type = "),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types = "),
        ({"attn_layer_offset": 3}, "attn_layer_offset = 3 is not below attn_layer_period = 3"),
        ({"attn_layer_period": 9, "attn_layer_offset": 8}, "leaves no layer with attention"),
        ({"sliding_window": 64}, "sliding_window = 64 is not supported"),
        ({"mamba_d_conv": 1}, "mamba_d_conv = 1 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ):
        assert complaint in str(read(config | wrong))


def test_kimi_linear_is_read_as_it_is_published() -> None:
    (case,) = (case for case in CASES if case.name == "kimi_linear")
    config = config_of(case)
    linear = {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 24,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    }
    names = ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    rest = {name: value for name, value in config.items() if name not in names}
    published = rest | {"linear_attn_config": linear, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    assert read(published) == read(config)
    for changed, complaint in (
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported"),
        ({"linear_attn_config": linear | {"kda_layers": [1]}}, "linear_attn_config does not name each layer once"),
        ({"linear_attn_config": linear | {"gate": 2}}, "linear_attn_config.gate is not supported"),
    ):
        assert complaint in str(read(published | changed))


def test_glm_5_says_in_three_ways_which_layers_choose() -> None:
    (case,) = (case for case in CASES if case.name == "glm_moe_dsa")
    config = {**config_of(case), "num_hidden_layers": 6, "mlp_layer_types": None, "layer_types": None}
    kinds = ["full", "full", "full", "shared", "shared", "full"]
    said = read(config | {"indexer_types": kinds})
    assert isinstance(said, ModelSpec)
    for other in ({"index_topk_pattern": "FFFSSF"}, {"index_topk_freq": 3, "index_skip_topk_offset": 3}):
        assert read(config | {"indexer_types": None} | other) == said
    for wrong, complaint in (
        ({"indexer_types": ["shared", *kinds[1:]]}, "indexer_types begins with a shared layer"),
        ({"indexer_types": kinds[1:]}, "it must say full or shared for each of 6 layers"),
        ({"indexer_types": 6}, "indexer_types = 6 is not supported: it must say full or shared"),
        ({"indexer_types": [[kind] for kind in kinds]}, "it must say full or shared for each of 6 layers"),
        ({"indexer_types": None, "index_topk_pattern": "FFFSSX"}, "index_topk_pattern = "),
        ({"indexer_types": None, "index_topk_pattern": 6}, "index_topk_pattern = 6 is not supported: it must say"),
        ({"index_topk_freq": "third"}, "index_topk_freq must be a positive integer up to 2147483647, not 'third'"),
        ({"index_skip_topk_offset": [2]}, "index_skip_topk_offset must be a positive integer"),
        ({"index_topk": 2**16 + 1}, "index_topk must be a positive integer up to 65536, not 65537"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False is not supported"),
        ({"index_head_dim": 8}, "index_head_dim = 8 is less than qk_rope_head_dim = 16"),
    ):
        assert complaint in str(read(config | {"indexer_types": kinds} | wrong))


def test_laguna_says_some_things_twice_and_they_agree() -> None:
    (case,) = (case for case in CASES if case.name == "laguna")
    config = config_of(case)
    said = {"mlp_only_layers": [0], "gating_types": ["per-head"] * 3, "norm_topk_prob": True, "gating": "per-head"}
    assert isinstance(expected := read(config), ModelSpec)
    assert read(config | said) == read({**config, **said, "mlp_layer_types": None}) == expected
    for wrong, complaint in (
        ({"mlp_only_layers": [1]}, "mlp_only_layers = [1] and mlp_layer_types differ"),
        ({"gating_types": ["per-head", "per-head", "none"]}, "gating_types = "),
        ({"gating": False}, "gating = False is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping = 3.0 is not supported"),
        ({"num_attention_heads_per_layer": [4, 8]}, "must be a count for each of 3 layers"),
        ({"num_attention_heads_per_layer": [4, 8, 3]}, "3 is no multiple of num_key_value_heads = 2"),
    ):
        assert complaint in str(read(config | said | wrong))


def another(value: object) -> object:
    """A value of the same type that asks for something else."""
    match value:
        case bool():
            return not value
        case int() | float():
            return 2 * value + 4
        case str():
            return f"{value}_of_another_kind"
        case list():
            return [*value, value[0]] if value else [1]
        case dict():
            return (
                {**value, "another": 3}
                if not any(isinstance(each, dict) for each in value.values())
                else {"another": 3}
            )
        case _:
            return 3
