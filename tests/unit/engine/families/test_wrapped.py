"""Of a checkpoint with towers the text part is read, and nothing that could change it is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.families import model_spec
from engine.spec.model import UnsupportedModelError
from tests.unit.engine.families.wrapped import CASES

CONFIGS: dict[str, dict[str, Any]] = {
    case.name: case.config_object().to_dict() | {"architectures": [case.architecture()]} for case in CASES
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_field_beside_the_texts_is_known_or_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="another_arithmetic = 2"):
        model_spec(CONFIGS[name] | {"another_arithmetic": 2})
    with pytest.raises(UnsupportedModelError, match="another_arithmetic = 2"):
        model_spec(CONFIGS[name] | {"text_config": CONFIGS[name]["text_config"] | {"another_arithmetic": 2}})


def test_a_text_model_of_an_unknown_kind_is_refused() -> None:
    config = CONFIGS["pixtral"]
    with pytest.raises(
        UnsupportedModelError, match=r"text_config.model_type = 'internlm2' is not supported; supported: "
    ):
        model_spec(config | {"text_config": config["text_config"] | {"model_type": "internlm2"}})
    with pytest.raises(UnsupportedModelError, match="text_config must say what the text model is"):
        model_spec({name: value for name, value in config.items() if name != "text_config"})


def without_ties(config: Mapping[str, Any], **text: Any) -> dict[str, Any]:
    inner = {name: value for name, value in config["text_config"].items() if name != "tie_word_embeddings"}
    return {name: value for name, value in config.items() if name != "tie_word_embeddings"} | {
        "text_config": inner | text
    }


@pytest.mark.parametrize(("name", "is_tied"), [("pixtral", False), ("internvl", True)])
def test_a_head_is_tied_as_the_fields_say_and_by_the_class_where_none_says(name: str, is_tied: bool) -> None:
    for whole in (False, True):
        assert model_spec(CONFIGS[name] | {"tie_word_embeddings": whole}).head.is_tied == whole
        assert model_spec(without_ties(CONFIGS[name], tie_word_embeddings=whole)).head.is_tied == whole
    assert model_spec(without_ties(CONFIGS[name])).head.is_tied == is_tied


def test_the_text_of_llava_onevision_ties_its_head_whatever_the_others_say() -> None:
    assert model_spec(CONFIGS["llava_onevision"] | {"tie_word_embeddings": False}).head.is_tied


def test_internvl_is_read_as_its_makers_write_it() -> None:
    config = CONFIGS["internvl"] | {"tie_word_embeddings": False}
    own = {"llm_config": config["text_config"], "architectures": ["InternVLChatModel"], "tie_word_embeddings": False}
    own |= {"vision_config": {"image_size": 448}, "select_layer": -1, "template": "internvl2_5", "ps_version": "v2"}
    own |= {"dynamic_image_size": True, "force_image_size": 448, "max_dynamic_patch": 12, "downsample_ratio": 0.5}
    spec = model_spec(own)
    assert spec == model_spec(config)
    assert spec.stored.ours("language_model.model.layers.0.mlp.gate.weight") == "model.layers.0.mlp.gate.weight"
    assert spec.stored.ours("language_model.lm_head.weight") == "lm_head.weight"
    assert spec.stored.ours("mlp1.0.weight") is None
    with pytest.raises(UnsupportedModelError, match=r"llm_config.model_type = 'internlm2' is not supported"):
        model_spec(own | {"llm_config": {"model_type": "internlm2"}})
