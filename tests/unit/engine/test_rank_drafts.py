"""Draft heads and draft models that ranks share: drafts and texts are those of one rank, across the handoff too."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import DraftConfig, EngineConfig
from engine.engine import Engine
from engine.parallel.group import RankLostError
from engine.spec.model import UnsupportedModelError
from tests.models import build_tiny_model
from tests.unit.engine.drafts import new_sequences
from tests.unit.engine.generate import Generator
from tests.unit.engine.rank_drafts import FOUR, HEADS, MTP, config_of, drafted
from tests.unit.engine.ranks import engine_of_ranks, threads_of

# Each form of drafter once, and each number of ranks: the others are `long`.
FIRST = {"eagle3": 4, "dflash": 4, "draft_model": 2, "mimo": 2}
WIDTHS = [*[(name, width) for name in HEADS for width in (2, 4)], *[(name, 2) for name in MTP]]


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(*each, marks=[] if FIRST.get(each[0]) == each[1] else [pytest.mark.long]) for each in WIDTHS],
)
def test_ranks_draft_what_one_does(name: str, size: int, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    answers, drafts = drafted(Engine(config))
    assert sum(bool(each) for one in drafts for each in one) > 3 * 14
    assert drafted(engine_of_ranks(config, size)) == (answers, drafts)


def test_a_drafter_that_ranks_can_not_share_is_refused_by_name(tmp_path: Path) -> None:
    """The target has four key and value heads, and the small model three query heads."""
    model = build_tiny_model(tmp_path / "target", "llama", **FOUR)
    small = build_tiny_model(tmp_path / "small", "qwen3", num_attention_heads=3, num_key_value_heads=3)
    config = EngineConfig(model=model, draft=DraftConfig(folder=small, is_model=True, num_drafts=2))
    with pytest.raises(UnsupportedModelError, match=r"draft = .*small: --tensor-parallel-size 2: ranks can't share 3"):
        Engine(replace(config, tensor_parallel_size=2))


@pytest.mark.parametrize("kind", [3, 4], ids=["reading", "guessing"])
def test_a_draft_that_is_told_twice_is_refused(kind: int, tmp_path: Path) -> None:
    engine = engine_of_ranks(config_of("eagle3", tmp_path), 2)
    Generator(engine).run(new_sequences()[:1])
    followers = threads_of(engine)
    followers.close()
    head = struct.pack("<BQ", kind, engine._lockstep.number)
    with pytest.raises(RankLostError, match=r"rank 1 is at pass .* they are out of step"):
        followers.engines[0].follow(head + bytes(8))
