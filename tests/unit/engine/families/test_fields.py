"""No field of a config.json is skipped: what it leaves out is transformers' default, what it has is computed or refused."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from engine.model.families import model_spec
from engine.model.families.known import HARMLESS
from engine.model.spec import ModelSpec, UnsupportedModelError
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.dense import CASES

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
OF_FAMILIES = {
    "cohere2": {"head_dim"},
    "gemma3-vision": {"tie_word_embeddings"},
    "gemma4": OF_GEMMA_4,
    "gemma4-vision": {*OF_GEMMA_4, "tie_word_embeddings"},
    "mistral3-vision": {"tie_word_embeddings"},
    "granite4": {"intermediate_size", "num_experts_per_tok", "time_step_limit"},
    "phi3": {"original_max_position_embeddings"},
    "qwen2": {"sliding_window"},
    "qwen3": {"sliding_window"},
    "smollm3": {"sliding_window", "use_sliding_window"},
}


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
    assert read({"architectures": [case.architecture()]}) == read(whole)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_field_matters_or_is_refused(case: Case) -> None:
    fields = config_of(case)
    inner = fields["text_config"] if case.text_in else fields
    expected = read(fields)
    assert isinstance(expected, ModelSpec), expected
    skipped = []
    for name, value in inner.items():
        if (
            name in HARMLESS
            or name in OTHERS
            or name in OF_FAMILIES.get(case.name, ())
            or name.startswith(("_", "mamba_"))
        ):
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
