# mypy: allow-untyped-calls
"""Jina v3's vectors are those of transformers' own class with a task's adapter merged into its matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from engine.pooling.engine import PoolingInput
from modelfiles.pooling import read_pooling
from tests.jina_models import INSTRUCTIONS, TASKS, build_jina, merged
from tests.unit.engine.pooling.references import EXACT, changed, engine_of, inputs

ALL = ("", *TASKS)


def test_vectors_are_those_of_transformers_with_each_adapter(tmp_path: Path) -> None:
    folder = build_jina(tmp_path)
    engine, texts = engine_of(folder), inputs()
    models = {task: merged(folder, task) for task in ALL}
    mixed = [(text, task) for text in texts for task in ALL]
    tokens = [PoolingInput(tokens=text, work="token_embed", is_raw=True, adapter=task) for text, task in mixed]
    vectors = [PoolingInput(tokens=text, adapter=task) for text, task in mixed]
    together = zip(mixed, engine.compute(tokens), engine.compute(vectors), strict=True)
    for (text, task), found, vector in together:
        with torch.no_grad():
            wanted = models[task](torch.tensor([text])).last_hidden_state[0].float()
        torch.testing.assert_close(found, wanted, **EXACT)
        torch.testing.assert_close(vector, normalize(wanted.mean(0, keepdim=True)), **EXACT)
    for at in range(24, 30):
        [alone] = engine.compute([tokens[at]])
        torch.testing.assert_close(alone, engine.compute(tokens)[at], **EXACT)
    assert len({tuple(one[0].tolist()) for one in engine.compute(vectors[24:30])}) == len(ALL)


def test_tasks_and_their_texts_are_read(tmp_path: Path) -> None:
    found = read_pooling(build_jina(tmp_path))
    assert found.tasks == TASKS
    others = {"query": "the ", "document": "a ", "clustering": ""}
    assert found.prompts.texts == INSTRUCTIONS | others
    asked = ("query", "document", "retrieval.query", "classification", "other")
    assert [found.adapter_of(one) for one in asked] == [
        "retrieval.query", "retrieval.passage", "retrieval.query", "classification", "",
    ]  # fmt: skip
    assert found.sizes == (8, 16, 32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute' is not supported"),
        ({"model_type": "bert"}, "model_type = 'bert' is not supported"),
        ({"emb_pooler": "mean"}, "emb_pooler = 'mean' is not supported"),
        ({"load_trained_adapters": False}, "load_trained_adapters = False is not supported"),
        ({"lora_adaptations": []}, "lora_adaptations names no adapter"),
        ({"lora_adaptations": "all"}, "lora_adaptations must be a list of names"),
        ({"lora_rank": 0}, "lora_rank must be a positive integer"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction = 0.5 is not supported"),
        ({"lora_adaptations": ["one"]}, "asks for"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = changed(build_jina(tmp_path), **changes)
    with pytest.raises(ValueError, match=says):
        engine_of(folder)
