# mypy: allow-untyped-calls
"""Vectors and scores are those of transformers, alone and among others of any length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.pooling.engine import PoolingConfig, PoolingEngine, PoolingInput
from tests.pooling_models import FAMILIES, build_pooling_model

LENGTHS = (1, 2, 5, 5, 17, 40, 64, 40, 3)
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def inputs(seed: int = 0, *, most: int = 64) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 100, (min(n, most),), generator=generator).tolist() for n in LENGTHS]


def engine_of(folder: Path, **options: Any) -> PoolingEngine:
    return PoolingEngine(PoolingConfig(model=folder, **options))


def reference(folder: Path, kind: Any = transformers.AutoModel) -> Any:
    """Transformers' own, in float64: in float32 its sums differ from the truth as ours do, and by the processor."""
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, family)
    engine, theirs = engine_of(folder), reference(folder)
    texts = inputs()
    together = engine.compute([PoolingInput(tokens=text, work="token_embed", is_raw=True) for text in texts])
    for text, found in zip(texts, together, strict=True):
        with torch.no_grad():
            wanted = theirs(torch.tensor([text])).last_hidden_state[0].float()
        torch.testing.assert_close(found, wanted, **EXACT)
        [alone] = engine.compute([PoolingInput(tokens=text, work="token_embed", is_raw=True)])
        torch.testing.assert_close(alone, found, **EXACT)


def _pooled(states: torch.Tensor, mode: str) -> torch.Tensor:
    """The definitions, a text at a time."""
    count = torch.arange(1, len(states) + 1).float()[:, None]
    return {
        "cls": lambda: states[0],
        "lasttoken": lambda: states[-1],
        "max": lambda: states.max(0).values,
        "mean": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
        "weightedmean": lambda: (states * count).sum(0) / count.sum(),
    }[mode]()


@pytest.mark.parametrize(
    ("said", "modes"),
    [
        ({"pooling_mode_mean_tokens": True}, ["mean"]),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ["cls"]),
        ({"pooling_mode": "lasttoken"}, ["lasttoken"]),
        ({"pooling_mode": ["max", "weightedmean"]}, ["max", "weightedmean"]),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ["mean_sqrt_len_tokens"]),
    ],
)
def test_pooling_is_what_the_files_say(said: dict[str, Any], modes: list[str], tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, modules=["Pooling"], pooling=said)
    engine, theirs = engine_of(folder), reference(folder)
    texts = inputs(1)
    for text, found in zip(texts, engine.compute([PoolingInput(tokens=text) for text in texts]), strict=True):
        with torch.no_grad():
            states = theirs(torch.tensor([text])).last_hidden_state[0].float()
        wanted = torch.cat([_pooled(states, mode) for mode in modes])[None]
        torch.testing.assert_close(found, wanted, **EXACT)


def test_products_and_lengths_follow(tmp_path: Path) -> None:
    """Dense, then Normalize; fewer dimensions have length 1 again; raw vectors keep theirs."""
    folder = build_pooling_model(tmp_path, modules=["Pooling", "Dense", "Normalize"])
    engine, theirs = engine_of(folder), reference(folder)
    from safetensors.torch import load_file

    dense = load_file(folder / "2_Dense" / "model.safetensors")
    [text, *_] = inputs(2)[4:]
    with torch.no_grad():
        mean = theirs(torch.tensor([text])).last_hidden_state[0].float().mean(0)
    raw = torch.tanh(mean @ dense["linear.weight"].T + dense["linear.bias"])[None]
    asked = [PoolingInput(tokens=text), PoolingInput(tokens=text, dimensions=8), PoolingInput(tokens=text, is_raw=True)]
    whole, short, plain = engine.compute(asked)
    torch.testing.assert_close(whole, raw / raw.norm(), **EXACT)
    torch.testing.assert_close(short, raw[:, :8] / raw[:, :8].norm(), **EXACT)
    torch.testing.assert_close(plain, raw, **EXACT)


@pytest.mark.parametrize(
    "family",
    ["BertForSequenceClassification", "XLMRobertaForSequenceClassification", "ModernBertForSequenceClassification"],
)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_those_of_transformers(family: str, labels: int, tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, family, num_labels=labels)
    engine = engine_of(folder)
    theirs = reference(folder, transformers.AutoModelForSequenceClassification)
    texts = inputs(3)
    seconds = [len(text) // 2 for text in texts]
    asked = [
        PoolingInput(tokens=text, work="classify", second=at, is_raw=True)
        for text, at in zip(texts, seconds, strict=True)
    ]
    has_types = family.startswith("Bert")
    for text, at, found in zip(texts, seconds, engine.compute(asked), strict=True):
        types = torch.tensor([[int(bool(at) and place >= at) for place in range(len(text))]])
        with torch.no_grad():
            wanted = theirs(torch.tensor([text]), **({"token_type_ids": types} if has_types else {})).logits.float()
        torch.testing.assert_close(found, wanted, **EXACT)
    [one] = engine.compute([PoolingInput(tokens=texts[4], work="classify")])
    [raw] = engine.compute([PoolingInput(tokens=texts[4], work="classify", is_raw=True)])
    torch.testing.assert_close(one, raw.sigmoid() if labels == 1 else raw.softmax(-1), **EXACT)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_act", "mish"), ("position_embedding_type", "relative_key"), ("embedding_factor", 2)]
)
def test_what_is_not_computed_is_refused_by_name(field: str, value: object, tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {field: value}))
    with pytest.raises(ValueError, match=f"{field} = {value!r} is not supported"):
        engine_of(folder)
