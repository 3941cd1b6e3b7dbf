"""What transformers can't compute over our cache is refused by name; who computes a model is a setting."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.foreign import ForeignDecoder, is_foreign
from engine.foreign.trial import read_config, register, tried
from engine.kernels import launch
from engine.spec.model import UnsupportedModelError
from engine.step.warm import tables_from
from tests.unit.engine.families.case import SHAPE, Case
from tests.unit.engine.generate import new_sequence

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


class Grows(torch.nn.Module):
    """Keeps the rows of its longest pass: graphs of shorter ones would read memory that it gave back."""

    rows: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is None or len(self.rows) < x.shape[1]:
            self.rows = torch.zeros(x.shape[1], 1, device=x.device, dtype=x.dtype)
        return x + self.rows[: x.shape[1]]


class Counts(torch.nn.Module):
    """Knows in Python how many passes there were."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return x * self.passes


class Brings(torch.nn.Module):
    """Copies factors of the host in each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(x.shape[1], 1).to(x.device, non_blocking=True)


class Settles(torch.nn.Module):
    """Makes a table in its first pass."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(1, device=x.device, dtype=x.dtype)
        return x * self.table


@pytest.mark.parametrize(
    ("part", "obstacle"),
    [
        (Grows, r"its passes change rows of model\.layers\.0\."),
        (Counts, r"its passes change passes of model\.layers\.0\."),
        (Brings, r"its passes bring numbers from the host \(aten\."),
        (Settles, "^$"),
    ],
)
def test_what_graphs_can_not_hold_is_found_without_a_gpu(
    part: type[torch.nn.Module], obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Case(name="llama", config="LlamaConfig").config_object().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "LlamaRMSNorm", lambda *_, **__: part())
    register()
    assert re.search(obstacle, tried(read_config(tmp_path)).obstacle)


def test_a_checkpoint_keeps_its_dtype(tmp_path: Path) -> None:
    config = Case(name="llama", config="LlamaConfig").config_object()
    config.dtype = torch.float16
    config.save_pretrained(tmp_path)
    assert ForeignDecoder(tmp_path).spec.dtype == "float16"


def test_tokens_that_no_kernel_sampled_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While kernels are only compiled, a pass that follows another one finds anything where its token would be."""
    model = Case(name="llama", config="LlamaConfig").build(tmp_path)
    engine = Engine(EngineConfig(model=model, model_impl="transformers", cache=CacheConfig(num_blocks=8)))
    sequence = new_sequence("r", list(range(12)), max_tokens=4)
    sequence.tables = tables_from(engine.layout, 0, 2)
    engine.launch([sequence.schedule(12)])
    engine._runner._newest.fill_(1 << 40)
    next_one = sequence.schedule(1)
    with pytest.raises(IndexError):
        engine.launch([next_one])
    monkeypatch.setattr(launch, "_asked", set())
    engine.launch([next_one])


def test_models_that_see_both_ways_are_refused(tmp_path: Path) -> None:
    Case(name="bert", config="BertConfig").config_object().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"bert\.encoder.* attends to later tokens"):
        ForeignDecoder(tmp_path)
