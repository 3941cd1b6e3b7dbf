"""Batches that were acknowledged survive a power cut of the broker as it is shipped, and do not with NATS's default."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.asks import Oracle
from tests.chaos.power import LINES, Cuts, can_mount, cut_power, judge, line_of

needs_mounts = pytest.mark.skipif(not can_mount(), reason="emulating a power cut needs root and loop devices")


def test_a_line_that_is_lost_or_there_twice_or_wrong_is_found(oracle: Oracle) -> None:
    lines = [line_of(random.Random(number), number) for number in range(3)]

    def entry(number: int, tokens: list[int]) -> dict[str, Any]:
        return {"custom_id": str(number), "response": {"body": {"choices": [{"token_ids": tokens}]}}}

    good = [entry(number, oracle.answer(line["body"])[0].tokens) for number, line in enumerate(lines)]
    error = {"custom_id": "2", "response": None, "error": {"code": "batch_expired"}}
    for entries, expected in (
        (good, (0, 0, 0)),
        (good[1:], (1, 0, 0)),
        ([*good, good[1]], (0, 1, 0)),
        ([*good[1:], entry(0, [1])], (0, 0, 1)),
        ([*good[:2], error], (0, 0, 1)),
        ([*good, entry(7, [1])], (0, 1, 1)),
    ):
        found = Cuts()
        judge(found, lines, entries, oracle)
        assert (found.lost, found.again, found.wrong) == expected


@pytest.mark.long
@needs_mounts
async def test_every_acknowledged_line_has_one_result_after_power_cuts(
    tmp_path: Path, model: Path, oracle: Oracle
) -> None:
    found = await cut_power(tmp_path / "run", model=model, oracle=oracle, cuts=2, always=True)
    assert found.acknowledged == 2 * LINES
    assert (found.lost, found.again, found.wrong) == (0, 0, 0)
    assert 0 < found.done_before[1] < LINES, "the second batch was not running when the power failed"


@needs_mounts
async def test_the_default_loses_what_it_acknowledged(tmp_path: Path, model: Path, oracle: Oracle) -> None:
    found = await cut_power(tmp_path / "run", model=model, oracle=oracle, cuts=1, always=False)
    assert found.lost > 0, "the negative control kept everything: the cut is none"
