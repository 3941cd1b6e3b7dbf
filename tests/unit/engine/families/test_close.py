"""Families close to others: what their makers write otherwise than transformers is read, what differs is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from engine.families import model_spec
from engine.spec.model import ModelSpec, UnsupportedModelError
from tests.unit.engine.families.experts import CASES
from tests.unit.engine.families.vision import CASES as BESIDE

OMNI = ("qwen2_5_omni", "qwen3_omni")


def config_of(name: str) -> dict[str, Any]:
    (case,) = (case for case in (*CASES, *BESIDE) if case.name == name)
    return case.config_object().to_dict() | {"architectures": [case.architecture()]}


def refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_spec(config)


def test_hy3_is_read_as_its_makers_write_it() -> None:
    sizes = {"num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "expert_hidden_dim": 1536}
    said = {"qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True}
    said |= {"enable_lm_head_fp32": True, "enable_attention_fp32_softmax": False, "use_grouped_mm": False}
    published = {"architectures": ["HYV3ForCausalLM"], "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    spec = model_spec(published | sizes | said)
    assert (
        spec.layers == model_spec(transformers.HYV3Config().to_dict() | {"architectures": ["HYV3ForCausalLM"]}).layers
    )
    assert spec.stored.ours("model.layers.80.eh_proj.weight") is None
    refused(published | sizes | said | {"qk_norm": False}, "qk_norm = False is not supported")
    refused(published | sizes | {"expert_hidden_dim": 768}, "expert_hidden_dim = 768 is not supported; supported: 1536")
    refused(published | sizes | {"mlp_bias": True}, "mlp_bias = True is not supported")


def test_a_share_of_mistral_4s_heads_is_the_part_that_turns() -> None:
    config = config_of("mistral4")
    rotation = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    assert model_spec(config | {"rope_parameters": rotation}) == model_spec(config)
    wrong = rotation | {"partial_rotary_factor": 0.5}
    refused(config | {"rope_parameters": wrong}, "partial_rotary_factor = 0.5 is not what qk_rope_head_dim says")


def beside_a_talker(name: str) -> dict[str, Any]:
    thinker = {key: value for key, value in config_of(name).items() if key != "architectures"}
    whole = {"qwen2_5_omni": "Qwen2_5OmniModel", "qwen3_omni": "Qwen3OmniMoeForConditionalGeneration"}[name]
    others = {"talker_config": {"num_hidden_layers": 3}, "code2wav_config": {"a": 1}, "token2wav_config": {"b": 2}}
    return {
        "architectures": [whole],
        "thinker_config": thinker,
        "im_start_token_id": 3,
        "enable_audio_output": True,
    } | others


@pytest.mark.parametrize("name", OMNI)
def test_a_thinker_is_read_beside_its_talker(name: str) -> None:
    spec, config = model_spec(beside_a_talker(name)), beside_a_talker(name)
    assert isinstance(spec, ModelSpec)
    assert spec == model_spec(config_of(name))
    assert spec.stored.ours("thinker.model.norm.weight") == "model.norm.weight"
    assert spec.stored.ours("thinker.lm_head.weight") == "lm_head.weight"
    assert {spec.stored.ours(other) for other in ("talker.a", "token2wav.b", "code2wav.c", "thinker.visual.d")} == {
        None
    }
    refused(config | {"another_arithmetic": 2}, "another_arithmetic = 2")
    refused(config | {"thinker_config": config["thinker_config"] | {"another_arithmetic": 2}}, "another_arithmetic = 2")
