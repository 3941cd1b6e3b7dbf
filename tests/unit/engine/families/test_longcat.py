"""What LongCat-Flash keeps in float32, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.families import model_spec
from engine.model.decoder import Decoder
from engine.spec.model import ModelSpec, UnsupportedModelError
from tests.unit.engine.families.latents import CASES

(CASE,) = (case for case in CASES if case.name == "longcat_flash")


def read(**changes: Any) -> ModelSpec:
    config = CASE.config_object().to_dict() | {"architectures": ["LongcatFlashForCausalLM"]}
    return model_spec(config | changes)


def test_a_router_and_what_latents_are_multiplied_by_are_not_rounded() -> None:
    weights = Decoder(read(), dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=16).weights
    dtypes = {name: place.tensor.dtype for name, (place, *_) in weights.destinations.items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    norms = {f"model.layers.{layer}.self_attn.kv_a_layernorm.weight" for layer in range(4)}
    router = ("classifier.weight", "e_score_correction_bias")
    assert wide == norms | {f"model.layers.{layer}.moe.router.{name}" for layer in (0, 2) for name in router}


def test_it_is_read_as_its_makers_and_other_servers_write_it() -> None:
    said = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA", "router_bias": False}
    assert read(**said, zero_expert_type="identity", router_dtype="float32", num_hidden_layers=2) == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_expert_type": "copy"}, "zero_expert_type = 'copy' is not supported"),
        ({"router_bias": True}, "router_bias = True is not supported"),
        ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora = False is not supported"),
        ({"q_lora_rank": None}, "q_lora_rank must be a positive integer"),
        ({"moe_topk": 11}, "moe_topk = 11 of 10 experts"),
        ({"num_layers": 1 << 20}, "num_layers must be a positive integer up to 2048"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(**changes)
