"""The names of served models, which nobody loads an engine for, are those that families read."""

from __future__ import annotations

import pytest

from engine.families import FAMILIES
from engine.families.gguf.rows import ROWS
from engine.pooling.families import DECODERS
from engine.pooling.families import FAMILIES as ENCODERS
from modelfiles.served import names, of_transformers, pooled_names, refusal


def test_the_names_are_those_of_the_families() -> None:
    assert names() == {
        "classes": FAMILIES.keys(),
        "gguf": ROWS.keys(),
        **{kind: names()[kind] for kind in ("encoders", "decoders", "others")},
    }
    assert pooled_names() == ENCODERS.keys()
    assert pooled_names(beside_modules=True) == ENCODERS.keys() | DECODERS.keys()


@pytest.mark.parametrize(
    ("named", "kind", "says"),
    [
        (["Qwen3ForCausalLM"], "classes", ""),
        (["Unheard", "LlamaForCausalLM"], "classes", ""),
        (["FooForCausalLM"], "classes", "FooForCausalLM is not served (docs/models.md)"),
        (
            ["Olmo4ForCausalLM"],
            "classes",
            "Olmo4ForCausalLM is not served (docs/models.md); nearest: Olmo3ForCausalLM, OlmoForCausalLM, OlmoeForCausalLM",
        ),
        ([], "classes", "a model without architectures is not served (docs/models.md)"),
        (["mamba2"], "gguf", "mamba2 is not served (docs/models.md); nearest: jamba"),
    ],
)
def test_a_refusal_names_the_nearest_that_are_served(named: list[str], kind: str, says: str) -> None:
    assert refusal(named, kind) == says


def test_models_of_transformers_are_known_without_importing_it() -> None:
    assert {"BloomForCausalLM", "bloom"} <= of_transformers()
    assert "FooForCausalLM" not in of_transformers()
