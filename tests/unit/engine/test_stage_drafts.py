"""Draft heads and draft models in the first of several stages: drafts, acceptance and texts are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.engine import Engine
from tests.unit.engine.rank_drafts import HEADS, SHORT, config_of, drafted
from tests.unit.engine.ranks import engine_of_stages, generated, threads_of

DEEP = [
    *[(name, 7, 2) for name in HEADS],
    ("mimo", 4, 2),
    ("deepseek_v3", 5, 2),
    ("qwen3_next", 8, 2),
    ("eagle3", 7, 3),
    ("dflash", 7, 4),
    ("draft_model", 5, 3),
]


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [pytest.param(*each, marks=[] if each[0] in SHORT else [pytest.mark.long]) for each in DEEP],
)
def test_the_first_stage_drafts_what_one_process_does(name: str, layers: int, count: int, tmp_path: Path) -> None:
    config = config_of(name, tmp_path, layers=layers)
    stages, alone = engine_of_stages(config, count), Engine(config)
    for sampling in ({}, {"temperature": 0.8, "seed": 7}):
        answers, drafts = drafted(alone, **sampling)
        assert sum(bool(each) for one in drafts for each in one) > 2 * 14
        assert drafted(stages, **sampling) == (answers, drafts)
    assert generated(stages) == generated(alone)  # in chunks, behind cached blocks, preempted
    assert all(engine._head is None for engine in threads_of(stages).engines)
