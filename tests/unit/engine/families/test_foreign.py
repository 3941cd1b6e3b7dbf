"""What transformers can't compute over our cache is refused by name; who computes a model is a setting."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.config import EngineConfig
from engine.foreign import ForeignDecoder, is_foreign
from engine.spec.model import UnsupportedModelError
from tests.unit.engine.families.case import SHAPE, Case

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16}


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        ("MambaConfig", {"state_size": 8}, "layer_types = .'linear_attention'. is not supported"),
        ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 4}, "layer_types = .'hybrid'. is not supported"),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "calls transformers' attention 0 times in 2 layers"),
        ("DeepseekV3Config", MLA, "keys and values of different sizes"),
        ("FalconConfig", {}, "has no attention that can be replaced"),
        ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, "rope_type = 'longrope'"),
        ("Llama4TextConfig", {"head_dim": 16}, "layer_types = .'chunked_attention'. is not supported"),
    ],
)
def test_what_can_not_be_paged_is_refused_by_name(
    config: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    Case(name=config, config=config, fields=SHAPE | fields).config_object().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        ForeignDecoder(tmp_path)


def test_a_model_that_calls_itself_stateful_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Case(name="helium", config="HeliumConfig", fields={"head_dim": 16}).config_object().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.HeliumForCausalLM, "_is_stateful", True)
    with pytest.raises(UnsupportedModelError, match=r"Helium.* keeps a state"):
        ForeignDecoder(tmp_path)


@pytest.mark.parametrize(
    ("config", "impl", "expected"),
    [
        ("LlamaConfig", "auto", False),
        ("LlamaConfig", "transformers", True),
        ("GPTNeoXConfig", "auto", True),
        ("GPTNeoXConfig", "baton", False),
    ],
)
def test_transformers_computes_what_no_family_knows(
    config: str, impl: str, expected: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(name=config, config=config)
    asked = case.config_object()
    asked.architectures = [case.architecture()]
    asked.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "baton.engine"):
        assert is_foreign(EngineConfig(model=tmp_path, model_impl=impl)) is expected
    assert ("engine.model_by_transformers" in caplog.messages) == (expected and impl == "auto")


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'transformers"):
        is_foreign(EngineConfig(model=tmp_path, model_impl="transformers"))
