"""Draft heads and draft models that ranks share: drafts and texts are those of one rank, across the handoff too."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.parallel.group import RankLostError
from engine.spec.model import UnsupportedModelError
from tests.models import build_tiny_model
from tests.unit.engine.drafters import drafter
from tests.unit.engine.drafts import PROMPTS, Drafts, new_sequences
from tests.unit.engine.generate import Generator
from tests.unit.engine.mtp_reference import FAMILIES
from tests.unit.engine.ranks import engine_of_ranks, threads_of

FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
HEADS = ("eagle3", "eagle3+norm_output+fc_norm", "eagle3+parallel", "dflash", "dflash+window", "draft_model")
MTP = ("mimo", "qwen3_next", "deepseek_v3")
SHORT = ("eagle3", "dflash", "draft_model", "mimo")  # one of each form; all others are `long`


def _config(name: str, folder: Path) -> EngineConfig:
    """The model and its drafter."""
    cache = CacheConfig(num_blocks=256)
    if name in MTP:
        FAMILIES[name].build(folder)
        return EngineConfig(
            model=folder / "model", cache=cache, draft=DraftConfig(folder=folder / "model", num_drafts=3)
        )
    model = build_tiny_model(folder / "target", "llama", num_hidden_layers=3, **FOUR)
    (folder / "draft").mkdir()
    settings, _ = drafter(name.replace("dflash", "").strip("+") if "dflash" in name else name, model, folder / "draft")
    return EngineConfig(model=model, cache=cache, **settings)


def _drafted(engine: Engine) -> tuple[list[list[int]], list[object]]:
    """Answers and all drafts: of passes without verification, then of passes that verify drafts of some quality."""
    plain = Generator(engine, chunk_size=16)
    answers = plain.run(new_sequences())
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    verifying = Generator(engine, chunk_size=32, draft=Drafts(known, wrong=0.3))
    assert verifying.run(new_sequences()) == answers
    results = [*plain.results.values(), *verifying.results.values()]
    return answers, [[result and result.drafts for result in one] for one in results]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in (*HEADS, *MTP)]
)
def test_ranks_draft_what_one_does(name: str, tmp_path: Path) -> None:
    config = _config(name, tmp_path)
    answers, drafts = _drafted(Engine(config))
    assert sum(bool(each) for one in drafts for each in one) > 3 * 14
    for size in (2,) if name in MTP else (2, 4):
        assert _drafted(engine_of_ranks(config, size)) == (answers, drafts)


def test_a_drafter_that_ranks_can_not_share_is_refused_by_name(tmp_path: Path) -> None:
    """The target has four key and value heads, and the small model three query heads."""
    model = build_tiny_model(tmp_path / "target", "llama", **FOUR)
    small = build_tiny_model(tmp_path / "small", "qwen3", num_attention_heads=3, num_key_value_heads=3)
    config = EngineConfig(model=model, draft=DraftConfig(folder=small, is_model=True, num_drafts=2))
    with pytest.raises(UnsupportedModelError, match=r"draft = .*small: --tensor-parallel-size 2: ranks can't share 3"):
        Engine(replace(config, tensor_parallel_size=2))


@pytest.mark.parametrize("kind", [3, 4], ids=["reading", "guessing"])
def test_a_draft_that_is_told_twice_is_refused(kind: int, tmp_path: Path) -> None:
    engine = engine_of_ranks(_config("eagle3", tmp_path), 2)
    Generator(engine).run(new_sequences()[:1])
    followers = threads_of(engine)
    followers.close()
    head = struct.pack("<BQ", kind, engine._lockstep._number)
    with pytest.raises(RankLostError, match=r"rank 1 is at pass .* they are out of step"):
        followers.engines[0].follow(head + bytes(8))
