"""The config.json of models that people serve, with all that their makers and quantisers wrote into them, are read."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cache.pages import layout_of, page_parts
from engine.config import CacheConfig
from engine.families import model_spec
from engine.formats.dense import DENSE
from engine.formats.packed import Awq, Gptq
from engine.formats.product import Format
from engine.spec.model import UnsupportedModelError
from tests.unit.engine.families.published import PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_is_read(name: str) -> None:
    config = PUBLISHED[name]
    spec = model_spec(config)
    text = config.get("text_config", config)
    assert spec.num_layers == text["num_hidden_layers"]
    assert spec.hidden_size == text["hidden_size"]
    assert bool(spec.quantization.name) == bool(config.get("quantization_config"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_more_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="another_arithmetic = 2"):
        model_spec(PUBLISHED[name] | {"another_arithmetic": 2})


@pytest.mark.parametrize(
    ("name", "block_size", "state_blocks"),
    [
        ("granite-4.0-h-small", 256, 37),
        ("nemotron-nano-9b-v2", 1024, 9),
        ("nemotron-3-nano-30b-a3b", 1024, 8),
        ("falcon-h1-7b", 256, 15),
        ("bamba-9b", 1024, 10),
        ("jamba-1.5-mini", 32, 31),
    ],
)
def test_states_fill_their_blocks(name: str, block_size: int, state_blocks: int) -> None:
    """As docs/kv.md says of some."""
    parts = page_parts(model_spec(PUBLISHED[name]), "bfloat16")
    layout = layout_of(parts, CacheConfig(), 8 << 30)
    assert (layout.block_size, layout.groups[0].blocks_per_entry) == (block_size, state_blocks)
    needed = sum(part.block_bytes(1) for part in parts if not part.per_token)
    assert needed <= state_blocks * layout.block_bytes <= 1.25 * needed


def test_a_model_of_a_million_tokens_is_served_within_its_chunks() -> None:
    assert model_spec(PUBLISHED["qwen2.5-1m"]).max_position_embeddings == 262_144


def test_the_first_gemma_means_the_approximation() -> None:
    first, later = (
        model_spec(PUBLISHED["gemma-2b old"] | {"hidden_act": act}) for act in ("gelu", "gelu_pytorch_tanh")
    )
    assert first == later


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("gemma-2-9b", {"sliding_window_size": 2048}, "sliding_window_size = 2048"),
        ("command-r7b", {"layer_switch": 3}, "layer_switch = 3"),
        ("command-r7b", {"rotary_pct": 0.5}, "rotary_pct = 0.5"),
        ("command-r7b", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token = 2"),
        ("minimax-m2", {"layernorm_mlp_beta": 0.5}, "layernorm_mlp_beta = 0.5"),
        ("starcoder2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("hunyuan", {"attention_head_dim": 64}, "attention_head_dim = 64"),
        ("qwen3-coder-480", {"use_qk_norm": False}, "use_qk_norm = False"),
    ],
)
def test_a_second_name_that_says_something_else_is_refused(name: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_spec(PUBLISHED[name] | wrong)


def auto_round(**changes: Any) -> dict[str, Any]:
    config = PUBLISHED["autoround"]
    return config | {"quantization_config": config["quantization_config"] | changes}


@pytest.mark.parametrize(
    ("changes", "module", "format"),
    [
        ({}, "model.layers.1.mlp.up_proj", Gptq(stored_bits=4, group=128, less_one=True, has_order=False)),
        ({}, "model.layers.0.mlp.gate", DENSE),
        ({}, "lm_head", DENSE),
        ({"block_name_to_quantize": ["model.layers.0", "model.layers.1"]}, "model.layers.2.mlp.up_proj", DENSE),
        ({"extra_config": {".*up_proj": {"bits": 16}}}, "model.layers.2.mlp.up_proj", DENSE),
        (
            {"extra_config": {"up_proj": {"bits": 8, "group_size": 32}}},
            "model.layers.2.mlp.up_proj",
            Gptq(stored_bits=8, group=32, less_one=True, has_order=False),
        ),
        (
            {"extra_config": {".*up_proj": {"bits": 16}, "model.layers.2.mlp.up_proj": {"bits": 8}}},
            "model.layers.2.mlp.up_proj",
            Gptq(stored_bits=8, group=128, less_one=True, has_order=False),
        ),
        (
            {"packing_format": "auto_round:auto_awq", "sym": False},
            "model.layers.2.mlp.up_proj",
            Awq(group=128, has_zeros=True),
        ),
        (
            {"packing_format": "auto_round", "sym": False},
            "model.layers.2.mlp.up_proj",
            Gptq(stored_bits=4, group=128, less_one=False, has_order=False),
        ),
        (
            {"packing_format": "auto_round:gptqmodel"},
            "model.layers.2.mlp.up_proj",
            Gptq(stored_bits=4, group=128, less_one=False, has_order=False),
        ),
        ({"block_name_to_quantize": [["model.layers.0"], ["model.layers.1"]]}, "model.layers.2.mlp.up_proj", DENSE),
        (
            {"extra_config": {"lm_head": {"bits": 8, "act_bits": 16}}},
            "lm_head",
            Gptq(stored_bits=8, group=128, less_one=True, has_order=False),
        ),
        (
            {"packing_format": None, "backend": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"},
            "model.layers.2.mlp.up_proj",
            Gptq(stored_bits=4, group=128, less_one=True, has_order=False),
        ),
    ],
)
def test_auto_round_says_what_it_packed(changes: dict[str, Any], module: str, format: Format) -> None:
    assert model_spec(auto_round(**changes)).format_of(module) == format


def test_modules_that_are_named_one_by_one_are_few_groups() -> None:
    """Else each module is looked for in as many groups: a mixture names each expert of each layer."""
    extra = {f"model.layers.{layer}.mlp.up_proj": {"bits": 16 if layer % 2 else 8} for layer in range(1000)}
    assert len(model_spec(auto_round(extra_config=extra)).quantization.groups) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sym": 2}, "sym = 2"),
        ({"packing_format": "auto_round:fp8"}, "packing_format = 'auto_round:fp8'"),
        ({"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({"act_bits": 8}, "act_bits = 8"),
        ({"bits": 5}, "bits = 5"),
        ({"extra_config": ["a"]}, "extra_config must be an object"),
        ({"extra_config": {"up_proj": {"rank": 8}}}, "extra_config.'up_proj' has rank"),
        ({"extra_config": {f".*{number}": {"bits": 16} for number in range(9999)}}, "patterns of .* at most 32768"),
        ({"block_name_to_quantize": "a," + "re:a+," * 9999}, "patterns of .* at most 32768"),
        ({"extra_config": {"up_proj": 4}}, "extra_config.'up_proj' must be an object"),
        ({"block_name_to_quantize": 7}, "must be a list of names"),
        ({"new_rounding": True}, "new_rounding = True"),
    ],
)
def test_what_auto_round_asks_for_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_spec(auto_round(**changes))
