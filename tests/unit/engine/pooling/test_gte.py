"""GTE's vectors and scores are those of an independent reference, alone and among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.pooling.engine import PoolingInput
from tests.unit.engine.pooling.gte import build_gte
from tests.unit.engine.pooling.references import EXACT, changed, check_vectors, engine_of, inputs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None, "rope_theta": 160000},
        {"type_vocab_size": 0, "rope_scaling": {"factor": 2.0, "type": "ntk"}},
        {"type_vocab_size": 2},
        {"pack_qkv": False},
        {"architectures": ["GteModel"], "model_type": "gte", "prefix": "", "rope_scaling": None},
        {"architectures": ["NewModel", "NewForTokenClassification"]},
    ],
    ids=["multilingual", "plain rotation", "no types", "two types", "three matrices", "Snowflake's", "two classes"],
)
def test_tokens_vectors_are_those_of_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    check_vectors(tmp_path, build_gte(tmp_path, **changes), lambda vectors: vectors[:1])


def test_weights_of_words_are_those_of_the_reference(tmp_path: Path) -> None:
    """A word has the greatest weight of its tokens; GTE's own code leaves out special ones."""
    theirs, texts = build_gte(tmp_path, architectures=["NewModel", "NewForTokenClassification"]), inputs()
    engine = engine_of(tmp_path)
    assert engine.pooling.heads is not None
    each = engine.compute([PoolingInput(tokens=text, work="token_classify", is_raw=True) for text in texts])
    found = engine.compute([PoolingInput(tokens=text, work="lexical") for text in texts])
    for text, weights, words in zip(texts, each, found, strict=True):
        with torch.no_grad():
            wanted = theirs.classifier(theirs(text)).float()
        torch.testing.assert_close(weights, wanted, **EXACT)
        greatest = dict[float, float]()
        for token, weight in zip(text, wanted[:, 0].tolist(), strict=True):
            if weight > greatest.get(token, 0.0) and token not in engine.pooling.heads.unweighted:
                greatest[float(token)] = weight
        torch.testing.assert_close(words, torch.tensor(sorted(greatest.items())).view(-1, 2), **EXACT)
    assert any(map(len, found))


@pytest.mark.parametrize(("labels", "types"), [(1, 1), (1, 2), (3, 0)])
def test_scores_are_those_of_the_reference(labels: int, types: int, tmp_path: Path) -> None:
    theirs, texts = build_gte(tmp_path, labels=labels, type_vocab_size=types), inputs(3)
    seconds = [len(text) // 2 for text in texts]
    asked = [
        PoolingInput(tokens=text, work="classify", second=at, is_raw=True)
        for text, at in zip(texts, seconds, strict=True)
    ]
    engine = engine_of(tmp_path)
    for text, at, found in zip(texts, seconds, engine.compute(asked), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(found, theirs.scores(text, at).float(), **EXACT)
    [alone] = engine.compute(asked[5:6])
    torch.testing.assert_close(alone, engine.compute(asked)[5], **EXACT)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute' is not supported"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm' is not supported"),
        ({"logn_attention_scale": True}, "logn_attention_scale = True is not supported"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling = .*dynamic.* is not computed"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.625}}, "rope_scaling = .* is not computed"),
        ({"rope_scaling": {"type": "ntk", "factor": 0.5}}, "rope_scaling = .* is not computed"),
        ({"rope_scaling": "ntk"}, "rope_scaling = 'ntk' is not computed"),
        ({"residual_scale": 2.0}, "residual_scale = 2.0 is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    build_gte(tmp_path)
    with pytest.raises(ValueError, match=says):
        engine_of(changed(tmp_path, **changes))
