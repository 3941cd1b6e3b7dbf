"""Files of sentence-transformers: what they say, and what is refused of them by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelfiles.pooling import PoolingError, is_pooled, read_pooling

BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8, "max_position_embeddings": 64}


CLASSIFIER = BERT | {"architectures": ["BertForSequenceClassification"]}


def folder_of(tmp_path: Path, **files: Any) -> Path:
    """A model's folder; a name's `_` stands for a dot, and `1_Pooling` for its folder's configuration."""
    for name, value in {"config_json": BERT, **files}.items():
        file = (
            tmp_path / "1_Pooling" / "config.json" if name == "pooling" else tmp_path / name.replace("_json", ".json")
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    return tmp_path


def module(kind: str, path: str = "") -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


def test_an_encoder_without_modules_is_pooled_by_its_mean(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    found = read_pooling(folder)
    assert is_pooled(folder)
    assert (found.modes, found.size, found.max_len, found.normalizes, found.works) == (
        ("mean",), 8, 64, False, ("embed", "token_embed"),
    )  # fmt: skip


def test_modules_prompts_and_lengths_are_read(tmp_path: Path) -> None:
    found = read_pooling(
        folder_of(
            tmp_path,
            modules_json=[module("Transformer"), module("Pooling", "1_Pooling"), module("Normalize", "2_Normalize")],
            pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": False},
            sentence_bert_config_json={"max_seq_length": 32},
            config_sentence_transformers_json={
                "prompts": {"query": "query: ", "document": ""},
                "default_prompt_name": "query",
                "similarity_fn_name": "dot",
            },
        )
    )
    assert (found.modes, found.normalizes, found.max_len, found.similarity) == (("cls",), True, 32, "dot")
    assert (found.prompts.texts["query"], found.prompts.default, found.prompts.are_pooled) == (
        "query: ",
        "query",
        False,
    )


def test_positions_of_roberta_begin_behind_the_padding(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "pad_token_id": 1}
    assert read_pooling(folder_of(tmp_path, config_json=config)).max_len == 62


@pytest.mark.parametrize(
    ("fields", "activation", "labels"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid", 1),
        ({"id2label": {"0": "no", "1": "yes"}}, "softmax", 2),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, "sigmoid", 2),
        (
            {"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "",
            1,
        ),
        ({"id2label": {"0": "x"}, "problem_type": "regression"}, "", 1),
    ],
)
def test_a_classifiers_activation(fields: dict[str, Any], activation: str, labels: int, tmp_path: Path) -> None:
    config = CLASSIFIER | fields
    found = read_pooling(folder_of(tmp_path, config_json=config))
    assert found.scoring is not None
    assert (found.scoring.activation, len(found.labels), found.works) == (activation, labels, ("classify",))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"modules_json": [module("WeightedLayerPooling")]}, "a module WeightedLayerPooling is not computed"),
        ({"modules_json": [module("Pooling", "../x")]}, "is outside of the model's folder"),
        ({"modules_json": [module("Pooling", "/x")]}, "is outside of the model's folder"),
        ({"modules_json": {}}, "must be a list of modules"),
        (
            {"modules_json": [module("Pooling", "1_Pooling")], "pooling": {"pooling_mode": "attention"}},
            "'attention' is not computed",
        ),
        (
            {"modules_json": [module("Pooling", "1_Pooling")], "pooling": {"pooling_mode": [["cls"]]}},
            "pooling_mode .'cls'. is not computed",
        ),
        (
            {"modules_json": [module("Pooling", "1_Pooling")], "pooling": {"pooling_mode": []}},
            "pooling_mode of none is not computed",
        ),
        ({"modules_json": [module("Normalize"), module("Pooling")]}, "in this order alone: Transformer, Pooling"),
        ({"config_json": BERT | {"hidden_size": "8"}}, "hidden_size must be a number above 0"),
        ({"config_json": CLASSIFIER | {"num_labels": 1 << 40}}, "num_labels must be a number above 0"),
        ({"config_json": CLASSIFIER | {"num_labels": [2]}}, "num_labels must be a number above 0"),
    ],
)
def test_a_refusal_names_file_and_field(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(PoolingError, match=says):
        read_pooling(folder_of(tmp_path, **files))


def test_a_prompt_s_name_that_is_none_is_no_default(tmp_path: Path) -> None:
    said = {"prompts": {"query": "q: "}, "default_prompt_name": ["query"]}
    assert read_pooling(folder_of(tmp_path, config_sentence_transformers_json=said)).prompts.default == ""


def test_a_module_without_a_path_is_read_in_the_model_s_folder(tmp_path: Path) -> None:
    config = BERT | {"pooling_mode": "lasttoken"}
    assert read_pooling(folder_of(tmp_path, config_json=config, modules_json=[module("Pooling")])).modes == (
        "lasttoken",
    )


def test_modules_that_come_later_are_seen(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config_json=BERT | {"architectures": ["LlamaForCausalLM"]})
    assert not is_pooled(folder)
    (tmp_path / "modules.json").write_text("[]")
    assert is_pooled(folder)


def test_what_generates_is_not_pooled(tmp_path: Path) -> None:
    assert not is_pooled(folder_of(tmp_path, config_json=BERT | {"architectures": ["LlamaForCausalLM"]}))
    assert not is_pooled(tmp_path / "nothing")


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "max_position_embeddings": 64}
WORDS = {"model": {"vocab": {"no": 3, "yes": 5}}, "added_tokens": [{"id": 9, "content": "<extra_0>"}]}


def test_words_behind_a_text_are_read_from_every_form(tmp_path: Path) -> None:
    """modules.json of sentence-transformers, vLLM's fields, and the published model, of which only the name tells."""
    modules = folder_of(
        tmp_path / "a", config_json=QWEN3, modules_json=[module("Transformer"), module("LogitScore", "1_LogitScore")]
    )
    (modules / "1_LogitScore").mkdir()
    (modules / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 7, "false_token_id": None}))
    headed = QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    fields = folder_of(tmp_path / "b", config_json=headed, tokenizer_json=WORDS)
    cached = tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    named = folder_of(cached, config_json=QWEN3, tokenizer_json=WORDS)
    for folder, words in ((modules, (7,)), (fields, (5, 3)), (named, (5, 3))):
        found = read_pooling(folder)
        assert is_pooled(folder)
        assert found.scoring is not None
        assert (found.scoring.words, found.scoring.activation, found.labels) == (words, "sigmoid", ("LABEL_0",))
    assert not is_pooled(folder_of(tmp_path / "Qwen3-8B", config_json=QWEN3, tokenizer_json=WORDS))


def test_the_token_behind_steps_is_the_tokenizers(tmp_path: Path) -> None:
    config = QWEN3 | {"architectures": ["Qwen2ForProcessRewardModel"], "id2label": {"0": "bad", "1": "good"}}
    found = read_pooling(folder_of(tmp_path, config_json=config, tokenizer_json=WORDS))
    assert found.scoring is not None
    assert (found.scoring.step, found.labels, found.works) == (9, ("bad", "good"), ("token_classify",))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    with pytest.raises(PoolingError, match=r"'<extra_0>'.* is no token"):
        read_pooling(tmp_path)


def test_a_module_without_its_folder_is_named(tmp_path: Path) -> None:
    """A folder fetched in part would be pooled by its mean, whatever its authors chose."""
    folder = folder_of(tmp_path, modules_json=[module("Transformer"), module("Pooling", "1_Pooling")])
    with pytest.raises(PoolingError, match=r"1_Pooling/config\.json is missing"):
        read_pooling(folder)
