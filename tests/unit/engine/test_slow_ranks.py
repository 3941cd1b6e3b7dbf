"""A slow rank's KV is written when the leader's pass is over: from then on blocks are handed over, or given to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig
from engine.engine import Chunk
from engine.model.layers import attention
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.ranks import engine_of_ranks, threads_of
from tests.unit.engine.tables import blocks_of_tokens
from worker.serving.allocation import admit


@pytest.mark.parametrize("samples", [False, True])
def test_a_pass_is_over_when_the_slowest_rank_has_written_its_kv(
    samples: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of_ranks(EngineConfig(model=tiny_model("llama"), cache=CacheConfig(num_blocks=8)), 2)
    (follower,), leader, write = threads_of(engine).engines, threading.get_ident(), attention.rope_and_write_kv

    def slowly(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != leader:
            time.sleep(0.1)
        return write(*arguments, **options)

    monkeypatch.setattr(attention, "rope_and_write_kv", slowly)
    generator, sequence = Generator(engine), new_sequence("a", prompt_of(32))
    admit(generator.pool, sequence, num_tokens=33)
    engine.launch([Chunk(sequence, 0, 32 if samples else 16, samples)]).wait()
    first = blocks_of_tokens(sequence)[0]
    assert (follower.kv[first].abs().amax(dim=(-1, -2, -3)) > 0).all(), "a layer's keys and values are missing"
