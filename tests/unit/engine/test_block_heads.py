"""DFlash and DSpark: what an engine drafts is the plain arithmetic's, wherever the text was computed, and changes no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.spec.model import UnsupportedModelError
from tests.models import build_tiny_model
from tests.unit.engine.dflash_reference import BLOCK, CONFIG, MASK, DFlashReference, write_dflash
from tests.unit.engine.drafts import PROMPTS, Drafts, check_hand_over, compare_drafts, new_sequences
from tests.unit.engine.generate import Generator, new_sequence

VARIANTS = ((), ("ends",), ("window",), ("dspark", "anchor"), ("dspark", "ends", "window"))


def _engine(model: Path, draft: Path | None, *, num_drafts: int = 16, **cache: Any) -> Engine:
    settings = CacheConfig(num_blocks=128, **cache)
    drafting = DraftConfig(folder=draft, num_drafts=num_drafts) if draft else None
    return Engine(EngineConfig(model=model, cache=settings, draft=drafting))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.mark.quick
@pytest.mark.parametrize("flags", VARIANTS, ids=lambda flags: "+".join(flags) or "plain")
@pytest.mark.parametrize("family", ["llama", "mistral"])  # windows of 24
def test_blocks_are_those_of_the_arithmetic(family: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "target", family, num_hidden_layers=3)
    head = write_dflash(tmp_path / "head", *flags)
    reference, engine = DFlashReference(model, head, *flags), _engine(model, head)
    plain, sequences = Generator(engine, chunk_size=16), new_sequences()
    answers = plain.run(sequences)
    assert compare_drafts(plain, sequences, reference) > 35
    longest = max(len(result.drafts) for result in plain.results["2"] if result is not None)
    assert longest == BLOCK - ("anchor" not in flags)
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    verifying, sequences = Generator(engine, chunk_size=32, draft=Drafts(known, wrong=0.3)), new_sequences()
    assert verifying.run(sequences) == answers
    assert sum(verifying.accepted) > 10
    assert compare_drafts(verifying, sequences, reference) > 10


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("flags", [("window",), ("dspark", "anchor")], ids="+".join)
def test_a_block_changes_no_text(
    target: Path, flags: tuple[str, ...], temperature: float, kv_cache_dtype: str, tmp_path: Path
) -> None:
    without = Generator(_engine(target, None, kv_cache_dtype=kv_cache_dtype))
    drafting = Generator(
        _engine(target, write_dflash(tmp_path, *flags), kv_cache_dtype=kv_cache_dtype),
        draft=lambda sequence: ((last := drafting.results[sequence.request_id][-1]) and last.drafts) or (),
    )
    answers = [each.run(new_sequences(temperature=temperature, seed=5)) for each in (drafting, without)]
    assert answers[0] == answers[1]
    assert len(drafting.accepted) > 20


def test_blocks_stay_right_across_a_hand_over(target: Path, tmp_path: Path) -> None:
    head = write_dflash(tmp_path)
    prefill, decode = (_engine(target, head, num_drafts=number) for number in (0, 16))
    assert prefill.fingerprint == decode.fingerprint
    check_hand_over(prefill, decode)


def test_blocks_end_where_the_sequence_s_do(target: Path, tmp_path: Path) -> None:
    generator = Generator(_engine(target, write_dflash(tmp_path)))
    generator.run([new_sequence("a", list(range(3, 23)), max_tokens=12)])  # two blocks of the pool
    found = [len(result.drafts) for result in generator.results["a"] if result is not None]
    assert found == [BLOCK - 1] * 8 + [3, 2, 1, 0]


def test_its_layers_are_further_ones_of_each_block(target: Path, tmp_path: Path) -> None:
    assert sorted(part.layers for part in _engine(target, write_dflash(tmp_path)).layout.pages) == [2, 3]


def test_a_head_of_speculators_is_read(target: Path, tmp_path: Path) -> None:
    write_dflash(tmp_path, "ends")
    beside = ("architectures", "dflash_config", "block_size")
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": {name: value for name, value in CONFIG.items() if name not in beside},
        "draft_vocab_size": 96,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 2],
        "max_anchors": 3072,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    generator, sequences = Generator(_engine(target, tmp_path)), new_sequences()
    generator.run(sequences)
    assert compare_drafts(generator, sequences, DFlashReference(target, tmp_path, "ends")) > 35


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 600}, "vocab_size = 600.*512"),
        ({"target_hidden_size": 128}, "target_hidden_size = 128.*64"),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}}, r"target_layer_ids = \[1, 3\]"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [0]}}, "mask_token_id = 512"),
        ({"block_size": 1}, "block_size = 1"),
        (
            {"is_causal": False, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},
            "a window whose",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"markov_head_type": "rnn"}, "markov_head_type"),
        ({"topk_context": 64}, "topk_context"),
        ({"draft_vocab_size": 96}, "draft_vocab_size = 96 without d2t"),
    ],
)
def test_what_is_not_computed_is_refused(target: Path, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        _engine(target, write_dflash(tmp_path, **changes))
