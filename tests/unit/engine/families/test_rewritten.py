"""Families that transformers has no code for answer as those whose checkpoints they store by other names."""

from __future__ import annotations

import pytest
import torch

from engine.families import model_spec
from engine.spec.model import UnsupportedModelError
from tests.unit.engine.families.case import SHAPE
from tests.unit.engine.families.exact import Bench
from tests.unit.engine.families.rewritten import REWRITTEN, Config, rewrite


@pytest.fixture(scope="module", params=REWRITTEN)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    case, _ = REWRITTEN[request.param]
    return Bench(
        case, tmp_path_factory.mktemp("family") / "model", stored=lambda folder: rewrite(folder, request.param)
    )


def test_it_answers_as_the_other_family(bench: Bench) -> None:
    bench.check_handed_over(chunk_size=23)


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("BailingMoeV2ForCausalLM", {"norm_head": True}),
        ("BailingMoeV2ForCausalLM", {"score_function": "softmax"}),
        ("MiniCPMForCausalLM", {"num_experts": 8}),
        ("MiniCPMForCausalLM", {"sparse_config": {"block_size": 64}}),
        ("ExaoneForCausalLM", {"another_arithmetic": 2}),
        ("Phi4MMForCausalLM", {"attention_bias": True}),
    ],
)
def test_what_is_not_computed_is_refused(architecture: str, field: Config) -> None:
    case, change = REWRITTEN[architecture]
    stored = case.config_object().to_dict()
    layers = range(stored["num_hidden_layers"])
    blank = {f"model.layers.{layer}.self_attn.{part}_proj.weight": torch.ones(1) for layer in layers for part in "qkv"}
    config, _ = change(stored, blank)
    config |= {"architectures": [architecture]}
    assert model_spec(config).hidden_size == SHAPE["hidden_size"]
    (name,) = field
    with pytest.raises(UnsupportedModelError, match=name):
        model_spec(config | field)
