"""Ranks and stages that sleep: all give their memory up or none does, they wake together, and one that ends is named."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.ranks.leading import leading
from engine.cache import memory
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.parallel.group import RankLostError
from engine.parallel.together import LackingError
from engine.weights.sleeping import MovedOut
from tests.unit.engine.drafters import drafter
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.ranks import Threads, allocated, engine_of_ranks, engine_of_stages, left_of, threads_of

PROMPTS = [[3 + (number * 37 + at * 11) % 400 for at in range(length)] for number, length in enumerate((39, 5, 27))]
SEVERAL = {
    "ranks": engine_of_ranks,
    "stages": engine_of_stages,
    "stages of ranks": partial(engine_of_stages, width=2),
}
WAYS = pytest.mark.parametrize("moves", [True, False], ids=["weights move", "the pool alone"])


def answers(engine: Engine) -> list[list[int]]:
    sequences = [new_sequence(str(at), prompt) for at, prompt in enumerate(PROMPTS)]
    sequences.append(new_sequence("drawn", PROMPTS[1], temperature=1.0, seed=5))
    return Generator(engine, chunk_size=16).run(sequences)


def of_followers_alone(problem: BaseException) -> Callable[..., object]:
    """Something that fails in the followers' threads, and does what it did in the leader's."""

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def tried(*said: object, **more: object) -> object:
            if threading.current_thread() is not threading.main_thread():
                raise problem
            return real(*said, **more)

        return tried

    return failing


@pytest.fixture(scope="module")
def config(tiny_model: Callable[[str], Path]) -> EngineConfig:
    return EngineConfig(model=tiny_model("mistral"), cache=CacheConfig(num_blocks=64))


@pytest.fixture(scope="module")
def wanted(config: EngineConfig) -> list[list[int]]:
    return answers(Engine(config))


def _inside(engine: Engine) -> torch.Tensor:
    """The lanes of a pool whose pages are its own."""
    return engine.kv.flatten()[4096:-4096]


@WAYS
@pytest.mark.parametrize("kind", SEVERAL)
def test_all_give_their_memory_back_and_answer_as_before_when_they_wake(
    kind: str, moves: bool, config: EngineConfig, wanted: list[list[int]]
) -> None:
    engine = SEVERAL[kind](config, 2, allocate=allocated)
    each = [engine, *threads_of(engine).engines]
    assert answers(engine) == wanted
    before = [left_of(one) for one in each]
    for _ in range(2):
        assert all(_inside(one).any() for one in each)
        asleep = engine.sleep(moves=moves)
        if moves:
            assert [left_of(one) for one in each] == [0] * len(each)
            assert asleep.num_bytes == before[0] - engine.kv.nbytes
        else:
            assert not any(_inside(one).any() for one in each)
        engine.wake(asleep)
        assert [left_of(one) for one in each] == before
        if moves:
            assert not any(one.kv.any() for one in each)
        assert answers(engine) == wanted


def test_drafters_of_ranks_sleep_too(config: EngineConfig, tmp_path: Path) -> None:
    settings, _ = drafter("draft_model", config.model, tmp_path)
    engine = engine_of_ranks(replace(config, **settings), 2, allocate=allocated)
    before, each = answers(engine), [engine, *threads_of(engine).engines]
    asleep = engine.sleep()
    assert [left_of(one) for one in each] == [0] * len(each)
    engine.wake(asleep)
    assert answers(engine) == before


@pytest.mark.parametrize("kind", SEVERAL)
def test_without_room_on_one_none_falls_asleep(kind: str, config: EngineConfig, wanted: list[list[int]]) -> None:
    engine = SEVERAL[kind](config, 2, allocate=allocated)
    before = left_of(engine)
    lacking = of_followers_alone(MemoryError("no room for 7 MiB"))
    with mock.patch.object(MovedOut, "__init__", lacking(MovedOut.__init__)):
        said = "; ".join(f"rank {rank}: no room for 7 MiB" for rank in range(1, 1 + len(threads_of(engine).engines)))
        with pytest.raises(LackingError, match=f"^{said}$"):
            engine.sleep()
    assert left_of(engine) == before
    assert answers(engine) == wanted
    engine.wake(engine.sleep())
    assert answers(engine) == wanted


@WAYS
@pytest.mark.parametrize("is_follower", [True, False], ids=["follower", "leader"])
def test_without_room_on_one_all_sleep_on_until_there_is_some(
    is_follower: bool, moves: bool, config: EngineConfig, wanted: list[list[int]]
) -> None:
    engine = engine_of_ranks(config, 2, allocate=allocated)
    asleep, problem = engine.sleep(moves=moves), MemoryError("no room for keys")
    place, name = (MovedOut, "_take") if moves else (memory, "take_again")
    real = getattr(place, name)

    def leader_alone(*said: object) -> object:
        if threading.current_thread() is threading.main_thread():
            raise problem
        return real(*said)

    with mock.patch.object(place, name, of_followers_alone(problem)(real) if is_follower else leader_alone):
        for _ in range(2):
            with pytest.raises(LackingError, match=rf"^rank {int(is_follower)}: no room for keys$"):
                engine.wake(asleep)
            if moves:
                assert left_of(engine) == 0
    assert engine.lost == ""
    engine.wake(asleep)
    assert answers(engine) == wanted


def test_whatever_else_fails_on_a_follower_loses_it(config: EngineConfig) -> None:
    engine = engine_of_ranks(config, 2, allocate=allocated)
    failing = of_followers_alone(ValueError("a broken device"))
    with mock.patch.object(MovedOut, "_copy", failing(MovedOut._copy)):
        with pytest.raises(RankLostError, match=r"rank 1 failed \(a broken device\)"):
            engine.sleep()
    assert "a broken device" in engine.lost


def test_whatever_else_fails_on_the_leader_ends_the_worker(config: EngineConfig) -> None:
    engine = engine_of_ranks(config, 2, allocate=allocated)
    with mock.patch.object(engine, "_forget_newest", side_effect=ValueError("a broken device")):
        with pytest.raises(RankLostError, match="rank 0: ValueError: a broken device"):
            engine.sleep()
    assert engine.lost == "rank 0: ValueError: a broken device"
    threads_of(engine).failed = engine.lost  # the follower still waits


@pytest.mark.parametrize("said", ["a pass", "sleep", "waking"])
def test_a_message_that_sleep_does_not_allow_is_refused(said: str, config: EngineConfig) -> None:
    engine = engine_of_ranks(config, 2, allocate=allocated)
    followers, frames = threads_of(engine), list[bytes]()

    def told(self: Threads, *sent: bytes) -> None:
        frames.extend(sent)
        self.tell(*sent)

    with mock.patch.object(Threads, "send", told):
        Generator(engine).run([new_sequence("a", [5, 6, 7], max_tokens=2)])
        asleep = engine.sleep()
        sleep, head = frames[-1], frames[0]
        if said == "waking":
            engine.wake(asleep)
    waking = bytes([6]) + sleep[1:9]
    following = bytes([1]) + (int.from_bytes(sleep[1:9], "little") + 1).to_bytes(8, "little") + head[9:]
    frame = {"a pass": following, "sleep": sleep, "waking": waking}[said]
    with pytest.raises(RankLostError, match=r"out of step") as refused:
        followers.by_turns(followers.engines[0].follow, frame)
    assert (", asleep, and rank 0 says message " in str(refused.value)) == (said != "waking")


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("is_woken", [True, False])
def test_a_rank_that_is_killed_asleep_is_named_and_nobody_waits_for_it(is_woken: bool, config: EngineConfig) -> None:
    with leading([], size=2) as ranks:
        engine = Engine(replace(config, tensor_parallel_size=2), allocate=allocated, ranks=ranks)
        before = answers(engine)
        engine.wake(engine.sleep(moves=False))
        assert answers(engine) == before
        asleep = engine.sleep(moves=False)
        [pid] = ranks.followers.pids  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        if is_woken:  # before anybody looked
            with pytest.raises(RankLostError, match=r"rank 1 \(pid \d+\)"):
                engine.wake(asleep)
        while not engine.lost:
            os.sched_yield()
        assert engine.lost.startswith(f"rank 1 (pid {pid}) ")
