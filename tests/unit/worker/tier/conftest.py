"""Small models of each kind of KV, with a pool for two prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from engine.cache.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.groups import held_at_most
from tests.unit.engine import hybrid_windows
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.generate import Generator
from tests.unit.worker.tier.serving import BLOCK, LENGTH, MODELS, NUM_PROMPTS, ask


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A pool of two prompts' blocks, or a few more."""
    name, options = MODELS[request.param]
    case = next(case for case in (*CASES, hybrid_windows.CASE) if case.name == name)
    folder = case.build(tmp_path_factory.mktemp("model"))
    with hybrid_windows.windows() if case is hybrid_windows.CASE else contextlib.nullcontext():
        config = EngineConfig.of(model=folder, num_blocks=400, block_size=BLOCK, max_model_len=160, **options)
        ample = Engine(config)
        pool = BlockPool.of(ample.layout)
        num_blocks = 2 * (held_at_most(pool.groups, -(-LENGTH // BLOCK)) + pool.fixed)
        small = EngineConfig.of(model=folder, num_blocks=num_blocks, block_size=BLOCK, max_model_len=160, **options)
        yield Engine(small, lender=ample)


@pytest.fixture(scope="module")
def cold(engine: Engine) -> list[list[int]]:
    """The answers without any prefix."""
    answers = []
    for number in range(NUM_PROMPTS):
        (answer,) = Generator(engine, chunk_size=48).run([ask(number)])
        answers.append(answer)
    return answers
