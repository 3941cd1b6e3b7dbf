# mypy: allow-untyped-calls
"""Scores of decoders are those of transformers: heads of labels, words behind a text, rewards of texts and steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.pooling.engine import PoolingEngine, PoolingInput
from modelfiles.pooling import read_pooling
from tests.pooling_models import build_scoring_model, write_logit_score, write_reward_head
from tests.unit.engine.pooling.references import EXACT, engine_of, inputs, reference

NO, YES, STEP = 256, 258, 264


def scores(engine: PoolingEngine, texts: list[list[int]], work: str = "classify") -> list[torch.Tensor]:
    """Scores without their activation, computed together, which are those of each alone."""
    found = engine.compute([PoolingInput(tokens=text, work=work, is_raw=True) for text in texts])
    [alone] = engine.compute([PoolingInput(tokens=texts[3], work=work, is_raw=True)])
    torch.testing.assert_close(alone, found[3], **EXACT)
    return found


@pytest.mark.parametrize(("family", "labels"), [("Qwen3", 1), ("Qwen3", 3), ("Qwen2", 1), ("Llama", 1), ("Mistral", 2)])
def test_labels_of_a_decoder_are_scored_behind_its_last_token(family: str, labels: int, tmp_path: Path) -> None:
    folder = build_scoring_model(tmp_path, f"{family}ForSequenceClassification", num_labels=labels)
    theirs, texts = reference(folder, transformers.AutoModelForSequenceClassification), inputs()
    each = scores(engine_of(folder), texts, "token_classify")
    for text, found, rows in zip(texts, scores(engine_of(folder), texts), each, strict=True):
        with torch.no_grad():
            wanted = theirs(torch.tensor([text])).logits.float()
        torch.testing.assert_close(found, wanted, **EXACT)
        assert rows.shape == (len(text), labels)
        torch.testing.assert_close(rows[-1:], wanted, **EXACT)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("bad", [NO, None])
def test_the_score_is_a_words_logit_or_what_it_has_more_than_anothers(
    is_tied: bool, bad: int | None, tmp_path: Path
) -> None:
    folder = build_scoring_model(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=is_tied)
    write_logit_score(folder, good=YES, bad=bad)
    engine, theirs, texts = engine_of(folder), reference(folder, transformers.AutoModelForCausalLM), inputs(1)
    for text, found in zip(texts, scores(engine, texts), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([text])).logits[0, -1]
        wanted = logits[YES] - (logits[bad] if bad is not None else 0)
        torch.testing.assert_close(found, wanted.float()[None, None], **EXACT)
    [raw, one] = engine.compute([PoolingInput(tokens=texts[4], work="classify", is_raw=raw) for raw in (True, False)])
    torch.testing.assert_close(one, raw.sigmoid(), **EXACT)


def test_words_that_config_json_names_are_the_same_score(tmp_path: Path) -> None:
    """vLLM's form of Qwen3-Reranker, whose folder says so by two fields; and the published one, by its name."""
    folder = build_scoring_model(tmp_path / "Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", tie_word_embeddings=True)
    text = inputs(2)[5]
    [by_name] = engine_of(folder).compute([PoolingInput(tokens=text, work="classify")])
    config = json.loads((folder / "config.json").read_bytes())
    other = folder.rename(tmp_path / "ranker")
    fields = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    (other / "config.json").write_text(json.dumps(config | fields | {"is_original_qwen3_reranker": True}))
    [by_fields] = engine_of(other).compute([PoolingInput(tokens=text, work="classify")])
    with torch.no_grad():
        logits = reference(other, transformers.Qwen3ForCausalLM)(torch.tensor([text])).logits[0, -1]
    wanted = (logits[YES] - logits[NO]).sigmoid().float()[None, None]
    torch.testing.assert_close(by_name, wanted, **EXACT)
    torch.testing.assert_close(by_fields, wanted, **EXACT)


def _states(folder: Path, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: Any = reference(folder, transformers.Qwen2Model)(torch.tensor([text])).last_hidden_state[0]
    return torch.as_tensor(found)


def test_a_reward_is_that_of_the_last_token_without_an_activation(tmp_path: Path) -> None:
    folder = build_scoring_model(tmp_path, "Qwen2Model")
    texts = inputs(3)
    states = [_states(folder, text) for text in texts]
    head = write_reward_head(folder, "ForRewardModel", labels=1)
    engine = engine_of(folder)
    assert read_pooling(folder).works == ("classify", "token_classify")
    for its, found, each in zip(states, scores(engine, texts), scores(engine, texts, "token_classify"), strict=True):
        with torch.no_grad():
            wanted = head(its).float()
        torch.testing.assert_close(found, wanted[-1:], **EXACT)
        torch.testing.assert_close(each, wanted, **EXACT)
    [plain] = engine.compute([PoolingInput(tokens=texts[0], work="classify")])
    torch.testing.assert_close(plain, scores(engine, texts)[0], **EXACT)


def test_rewards_of_steps_are_shares_behind_each_of_them(tmp_path: Path) -> None:
    folder = build_scoring_model(tmp_path, "Qwen2Model")
    texts = [[5, STEP, 7, 8, STEP], [9, 9, STEP], [4, 4]]
    states = [_states(folder, text) for text in texts]
    head = write_reward_head(folder, "ForProcessRewardModel", labels=2)
    assert read_pooling(folder).works == ("token_classify",)
    found = engine_of(folder).compute([PoolingInput(tokens=text, work="token_classify") for text in texts])
    assert [len(each) for each in found] == [2, 1, 0]
    for text, its, each in zip(texts, states, found, strict=True):
        with torch.no_grad():
            wanted = head(its[[token == STEP for token in text]]).softmax(-1).float()
        torch.testing.assert_close(each, wanted, **EXACT)
