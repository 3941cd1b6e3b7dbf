"""Draft heads and draft models in the first of several stages: drafts, acceptance and texts are those of one process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.batch.layout import Packed
from engine.engine import Engine
from engine.lockstep import _Kind
from engine.parallel.group import RankLostError
from tests.unit.engine.drafts import check_hand_over
from tests.unit.engine.generate import Generator, new_sequence, scored
from tests.unit.engine.rank_drafts import HEADS, config_of, drafted, streamed
from tests.unit.engine.ranks import Threads, allocated, asked, engine_of_stages, generated, left_of, threads_of

PATIENCE_S = 60.0
NOT_YET_S = 0.05
DEEP = [
    ("mimo", 4, 2),
    ("eagle3", 9, 3),
    ("dflash", 7, 4),
    ("draft_model", 5, 3),
]
TWO = [*[(name, 7, 2) for name in HEADS], ("deepseek_v3", 5, 2), ("qwen3_next", 8, 2)]  # `long`: as two stages do below
MORE = ("dflash+window", "mimo", "deepseek_v3")
LAYERS = {"mimo": 4, "qwen3_next": 8, "deepseek_v3": 4}  # of models with a layer of their own; 7 of others


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [*DEEP, *(pytest.param(*each, marks=pytest.mark.long) for each in TWO)],
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


@pytest.mark.quick("draft_model-2")
@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("eagle3", 2),
        ("draft_model", 2),
        pytest.param("dflash", 2, marks=pytest.mark.long),
        pytest.param("mimo", 2, marks=pytest.mark.long),
        pytest.param("eagle3+parallel", 4, marks=pytest.mark.long),
    ],
)
def test_ranks_of_the_first_stage_draft_together(name: str, width: int, tmp_path: Path) -> None:
    config = config_of(name, tmp_path, layers=LAYERS.get(name, 7))
    stages, alone = engine_of_stages(config, 2, width=width), Engine(config)
    assert drafted(stages) == drafted(alone)
    assert streamed(stages) == streamed(alone)
    assert not any(engine._lockstep._later.are_some for engine in threads_of(stages).engines)


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(
    "name",
    [
        "eagle3",
        "draft_model",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("dflash", "mimo", "deepseek_v3")),
    ],
)
def test_drafts_belong_to_their_streams_while_a_pass_is_in_each_stage(name: str, tmp_path: Path) -> None:
    """Chunks of prompts, and streams that verify their own drafts, in as many passes as there are stages."""
    config = config_of(name, tmp_path, layers=LAYERS.get(name, 7))
    stages, alone = engine_of_stages(config, 3 if name == "eagle3" else 2), Engine(config)
    for sampling in ({}, {"temperature": 0.7, "seed": 3}):
        wanted = streamed(alone, count=3, **sampling)
        assert wanted[2]
        assert streamed(stages, count=3, **sampling) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "eagle3",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("draft_model", "dflash+window", "mimo", "deepseek_v3")
        ),
    ],
)
def test_what_a_drafter_keeps_is_handed_over_to_other_depths(name: str, tmp_path: Path) -> None:
    """From one process to stages, back, and between two divisions."""
    config = config_of(name, tmp_path, layers=LAYERS.get(name, 7))
    alone, two, three = Engine(config), engine_of_stages(config, 2), engine_of_stages(config, 3)
    for prefill, decode in ((alone, two), (two, alone), (two, three)):
        assert prefill.fingerprint == decode.fingerprint
        assert prefill.layout.same_model(decode.layout)
        check_hand_over(prefill, decode)


def test_all_ways_to_sample_and_a_grammar_are_drafted_behind(tmp_path: Path) -> None:
    config = config_of("eagle3", tmp_path, layers=7)
    stages, alone = engine_of_stages(config, 2), Engine(config)
    wanted, found = Generator(alone, chunk_size=23), Generator(stages, chunk_size=23)
    assert found.run(asked()) == wanted.run(asked())
    assert found.results == wanted.results
    assert any(each and each.drafts for one in found.results.values() for each in one)
    prompt = [5 + 7 * at % 90 for at in range(70)]
    scoring = [[new_sequence("s", prompt, prompt_logprobs=3), new_sequence("p", prompt[:20])] for _ in range(2)]
    assert scored(stages, scoring[0], chunk_size=33) == scored(alone, scoring[1], chunk_size=33)
    assert scoring[0][0].prompt_logprobs == scoring[1][0].prompt_logprobs


def test_passes_and_drafts_take_turns(tmp_path: Path) -> None:
    """The first pass is drafted behind when the second one has been launched, although its results are known before."""
    stages = engine_of_stages(config_of("eagle3", tmp_path, layers=7), 2)
    begins, wants, reads, executed = threading.Event(), threading.Event(), threading.Event(), list[Packed]()
    generator, sequence = Generator(stages), new_sequence("a", [5 + 7 * at % 90 for at in range(40)])
    assert stages._head is not None
    execute, turn, read = stages._runner.execute, stages._lockstep.turn, stages._head.read

    def executing(packed: Packed) -> torch.Tensor | None:
        executed.append(packed)
        if len(executed) == 2:
            begins.set()
            assert wants.wait(PATIENCE_S)
            assert not reads.wait(NOT_YET_S)
        return execute(packed)

    @contextmanager
    def a_turn() -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            assert begins.wait(PATIENCE_S), "between two launches it would have its turn at once"
            wants.set()
        with turn():
            yield

    def reading(*inputs: Any) -> Any:
        reads.set()
        return read(*inputs)

    generator.admit(sequence)
    with (
        mock.patch.object(stages._runner, "execute", executing),
        mock.patch.object(stages._lockstep, "turn", a_turn),
        mock.patch.object(stages._head, "read", reading),
    ):
        chunks = [[sequence.schedule(20)], [sequence.schedule(20)]]
        for each, pass_ in zip(chunks, [stages.launch(each) for each in chunks], strict=True):
            generator.deliver(each, pass_)
    assert reads.is_set()


@pytest.mark.parametrize("kind", [_Kind.READING, _Kind.GUESSING])
def test_a_draft_that_is_told_twice_is_refused(kind: _Kind, tmp_path: Path) -> None:
    stages = engine_of_stages(config_of("eagle3", tmp_path, layers=7), 2, width=2)

    def send(self: Threads, *frames: bytes) -> None:
        for frame in frames:
            self.tell(*[frame] * (2 if frame[0] == kind else 1))

    with mock.patch.object(Threads, "send", send), pytest.raises(RankLostError):
        Generator(stages).run([new_sequence("a", [5, 6, 7])])
    assert re.match(
        rf"rank 1 failed \(rank 1 is at pass \d+.*message {kind} of pass \d+: they are out of step", stages.lost
    )


def test_a_first_stage_sleeps_with_its_drafter(tmp_path: Path) -> None:
    stages = engine_of_stages(config_of("draft_model", tmp_path, layers=5), 2, allocate=allocated)
    before, each = drafted(stages), [stages, *threads_of(stages).engines]
    asleep = stages.sleep()
    assert [left_of(one) for one in each] == [0] * len(each)
    stages.wake(asleep)
    assert drafted(stages) == before


def test_a_failed_draft_fails_its_pass(tmp_path: Path) -> None:
    stages = engine_of_stages(config_of("eagle3", tmp_path, layers=7), 2)
    assert stages._head is not None
    with mock.patch.object(stages._head, "read", side_effect=MemoryError("no room")):
        with pytest.raises(RankLostError, match=r"a pass failed on rank 0 \(MemoryError: no room\)"):
            Generator(stages).run([new_sequence("a", [5, 6, 7])])
