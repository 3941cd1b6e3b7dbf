"""Ranks sample what one rank does, whatever is asked of the sampler, without being told a token; out of step they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.parallel.group import RankLostError
from engine.sequence import Sequence
from tests.unit.engine.drafts import Drafts
from tests.unit.engine.generate import Generator, new_sequence, scored
from tests.unit.engine.ranks import Threads, asked, engine_of_ranks, threads_of


@pytest.fixture(scope="module")
def config(tiny_model: Callable[[str], Path]) -> EngineConfig:
    return EngineConfig(model=tiny_model("mistral"), cache=CacheConfig(num_blocks=160))


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> Engine:
    return Engine(config)


@pytest.fixture(scope="module")
def ranks(config: EngineConfig) -> Engine:
    return engine_of_ranks(config, 2)


def test_ranks_sample_what_one_does(alone: Engine, ranks: Engine) -> None:
    wanted, found = Generator(alone, chunk_size=23), Generator(ranks, chunk_size=23)
    answers = wanted.run(asked())
    assert found.run(asked()) == answers
    for name, results in wanted.results.items():
        for one, other in zip(results, found.results[name], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None and one.logprobs is not None:
                assert other.logprobs is not None
                assert other.logprobs.top_ids == one.logprobs.top_ids
                assert other.logprobs.logprob == pytest.approx(one.logprobs.logprob, abs=1e-4)


def test_drafts_change_nothing(alone: Engine, ranks: Engine) -> None:
    answers = Generator(alone).run(asked())
    known = {tuple(sequence.token_ids): answer for sequence, answer in zip(asked(), answers, strict=True)}
    drafting = Generator(ranks, draft=Drafts(known, wrong=0.2))
    assert drafting.run(asked()) == answers
    assert sum(drafting.accepted) > 9


def test_prompts_are_scored_beside_others(alone: Engine, ranks: Engine) -> None:
    def scored_ones() -> list[Sequence]:
        prompt = [5 + 7 * at % 90 for at in range(70)]
        sequences = [new_sequence("scored", prompt, prompt_logprobs=3), new_sequence("plain", prompt[:20])]
        return [*sequences, new_sequence("drawn", prompt[:9], temperature=1.0, seed=5)]

    one, several = scored_ones(), scored_ones()
    assert scored(ranks, several, chunk_size=33) == scored(alone, one, chunk_size=33)
    assert several[0].prompt_logprobs is not None
    assert one[0].prompt_logprobs is not None
    assert several[0].prompt_logprobs.top_ids == one[0].prompt_logprobs.top_ids


def test_no_token_is_sent(config: EngineConfig) -> None:
    """Greedy passes are said by words of a constant size, whatever was sampled."""
    ranks = engine_of_ranks(config, 2)
    said = list[bytes]()
    followers = threads_of(ranks)
    with mock.patch.object(Threads, "send", lambda self, *frames: (said.extend(frames), self.tell(*frames))):
        Generator(ranks).run([new_sequence("a", [5, 6, 7], max_tokens=9)])
    assert len(said) == 18
    assert {frame[1:9] for frame in said} == {number.to_bytes(8, "little") for number in range(1, 10)}
    assert max(map(len, said[1::2])) < 32
    assert not followers.problem()


@pytest.mark.parametrize(
    ("number", "times", "says"),
    [(2, 0, "message 1 of pass 2"), (2, 2, "message 2 of pass 1"), (3, 2, "message 1 of pass 2")],
)
def test_ranks_out_of_step_are_refused(config: EngineConfig, number: int, times: int, says: str) -> None:
    """A message that does not come, or comes twice."""
    ranks, count = engine_of_ranks(config, 2), 0

    def send(self: Threads, *frames: bytes) -> None:
        nonlocal count
        count += 1
        for _ in range(times if count == number else 1):
            self.tell(*frames)

    with mock.patch.object(Threads, "send", send), pytest.raises(RankLostError, match=r"rank 1 failed.*out of step"):
        Generator(ranks).run([new_sequence("a", [5, 6, 7], max_tokens=9)])
    assert "rank 1 is at pass " in ranks.lost
    assert f"rank 0 says {says}" in ranks.lost


def test_a_failed_pass_names_its_rank(config: EngineConfig) -> None:
    ranks = engine_of_ranks(config, 2)
    runner = threads_of(ranks).engines[0]._runner
    with (
        mock.patch.object(runner, "execute", side_effect=MemoryError("no room")),
        pytest.raises(RankLostError, match=r"rank 1 failed \(no room\)"),
    ):
        Generator(ranks).run([new_sequence("a", [5, 6, 7])])


def test_what_is_no_message_is_refused(ranks: Engine) -> None:
    follower = threads_of(ranks).engines[0]
    with pytest.raises(ValueError, match="same release"):
        follower.follow(b"\x01\x02")
    with pytest.raises(RankLostError, match="out of step"):
        follower.follow(b"\x09" + bytes(8))
