"""Ranks as processes that a test or a benchmark leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.ranks.leading import leading
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.unit.engine.generate import Generator, new_sequence, said_in_flight


def test_ranks_of_processes_generate_what_one_does(tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(model=tiny_model("llama"), cache=CacheConfig(num_blocks=32))

    def said(engine: Engine) -> list[list[int]]:
        sequences = [new_sequence("a", [5, 6, 7]), new_sequence("b", [9] * 30, temperature=1.0, seed=3)]
        return [*Generator(engine).run(sequences), said_in_flight(engine, [7, 8, 9])]

    with leading([], size=2) as ranks:
        assert said(Engine(replace(config, tensor_parallel_size=2), ranks=ranks)) == said(Engine(config))
