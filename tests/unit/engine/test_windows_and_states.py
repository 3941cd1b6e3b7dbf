"""A model with windows and states keeps each in a KV group of its own, and answers as one pass without a cache does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.words import Keeps
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.unit.engine import hybrid_windows
from tests.unit.engine.by_hand import NAN
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, move, new_sequence
from tests.unit.engine.hybrid_windows import WINDOW

NUM_TOKENS = 12
LENGTHS = (1, 15, 33, 64, 150)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """A prefill worker's and a decode worker's."""
    folder = hybrid_windows.build(tmp_path_factory.mktemp("both"))
    with hybrid_windows.windows():
        config = EngineConfig(model=folder, cache=CacheConfig(num_blocks=200))
        yield Engine(config), Engine(config)


@pytest.fixture(scope="module")
def answers(engines: tuple[Engine, Engine]) -> dict[int, list[int]]:
    """Greedy tokens by the prompt's length, each computed by one pass over all before it, whose windows stay whole."""
    folder = Path(engines[0].config.model)
    with hybrid_windows.windows():
        alone = Engine(
            EngineConfig(model=folder, cache=CacheConfig(num_blocks=200, disable_hybrid_kv_cache_manager=True))
        )
    assert [group.keeps for group in alone.layout.groups] == [Keeps.STATE]
    found = dict[int, list[int]]()
    for length in LENGTHS:
        tokens = prompt_of(length)
        for _ in range(NUM_TOKENS):
            [[token]] = Generator(alone).run([new_sequence("one pass", tokens, max_tokens=1)])
            tokens = [*tokens, token]
        found[length] = tokens[length:]
    return found


def test_each_kind_is_a_group_of_the_layout(engines: tuple[Engine, Engine]) -> None:
    layout = engines[0].layout
    assert [group.keeps for group in layout.groups] == [Keeps.WINDOW, Keeps.STATE]
    assert layout.groups[0].window == WINDOW
    assert sum(part.layers for part in layout.pages) == 1, "windows are not in blocks of tokens"


@pytest.mark.parametrize("chunk_size", [512, 23])
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_handoff_and_decode_answer_as_one_pass(
    engines: tuple[Engine, Engine], answers: dict[int, list[int]], length: int, chunk_size: int
) -> None:
    prefill, decode = (Generator(engine, chunk_size=chunk_size) for engine in engines)
    for engine in engines:
        engine.kv.flatten(1).view(torch.uint8).fill_(NAN)  # nobody wrote anything
    decode.pool.allocate(5)  # a block has another id at the other end
    sequence = new_sequence("moved", prompt_of(length), max_tokens=NUM_TOKENS)
    prefill.start(sequence)
    if length > 2 * WINDOW:
        window = sequence.tables[1]
        assert window.num_gone > 0
        held = prefill.pool.num_used
        whole = len(sequence.tables[0].entries) * prefill.pool.growth + prefill.pool.fixed
        assert held == whole - window.num_gone * prefill.pool.groups[1].blocks, "what no window sees was not freed"
    move(sequence, prefill, decode)
    decode.go_on([sequence])
    decode.release(sequence)
    assert sequence.token_ids[length:] == answers[length]
    assert (prefill.pool.num_used, decode.pool.num_used) == (0, 5)


@pytest.mark.parametrize("chunk_size", [512, 23])
def test_a_prefix_hit_and_a_preemption_change_no_token(
    engines: tuple[Engine, Engine], answers: dict[int, list[int]], chunk_size: int
) -> None:
    generator = Generator(engines[0], chunk_size=chunk_size)
    size, length = generator.pool.block_size, 150
    first = new_sequence("first", prompt_of(length), max_tokens=NUM_TOKENS)
    assert generator.run([first]) == [answers[length]]
    again = new_sequence("again", prompt_of(length), max_tokens=NUM_TOKENS)
    generator.admit(again)
    assert again.num_cached == (length - 1) // size * size
    generator.go_on([again], num_tokens=5)
    generator.release(again)  # it gave way
    generator.admit(again)
    assert 0 < again.num_cached <= length
    generator.go_on([again])
    generator.release(again)
    assert again.token_ids[length:] == answers[length]
    assert generator.pool.num_used == 0


def test_a_prefix_is_resumed_where_both_groups_can_be(engines: tuple[Engine, Engine]) -> None:
    """The minimum over the groups: a checkpoint without its window is of no use, nor a window without a checkpoint."""
    generator = Generator(engines[0])
    prompt, pool = prompt_of(150), generator.pool
    sequence = new_sequence("first", prompt, max_tokens=2)
    generator.admit(sequence)
    generator.go_on([sequence])
    digests = list(sequence.digests)
    generator.release(sequence)
    most = len(pool.match_resumable(digests)[0])
    assert most == len(digests)
    window = [pool.match_entries(1, [digest])[0] for digest in digests[-2:]]
    pool.withdraw(window[0], [])
    found = pool.match_resumable(digests)
    assert len(found[0]) < most - 2
    assert (len(found[0]) == 0) == (found[2] == [])
