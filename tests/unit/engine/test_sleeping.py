"""An engine that sleeps: what it had is in host memory, its device's memory is free, and it answers as before when it wakes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.weights import sleeping
from engine.weights.sleeping import MovedOut, storages_of
from tests.unit.engine.captured_chains import Again
from tests.unit.engine.drafters import drafter
from tests.unit.engine.generate import Generator, new_sequence

PROMPTS = [[3 + (number * 37 + at * 11) % 400 for at in range(length)] for number, length in enumerate((39, 5, 27))]


def new_engine(model: Path, **settings: Any) -> Engine:
    """One whose pool is torch's own memory, as a GPU's is."""
    cache = CacheConfig(num_blocks=64)
    return Engine(
        EngineConfig(model=model, cache=cache, **settings),
        allocate=lambda *asked: torch.zeros(asked[0], dtype=asked[1]),
    )


def answers(engine: Engine) -> list[list[int]]:
    return Generator(engine, chunk_size=16).run(new_sequence(str(at), prompt) for at, prompt in enumerate(PROMPTS))


def content_of(engine: Engine) -> list[torch.Tensor]:
    """Copies of all tensors that the decoder reaches, the pool's left out."""
    pool = engine.kv.untyped_storage().data_ptr()
    found = storages_of([engine._decoder], engine.kv.device)
    return [sleeping._bytes_of(one, engine.kv.device).clone() for one in found if one.data_ptr() != pool]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3_moe"])
def test_what_wakes_answers_as_before_and_nothing_was_left_on_the_device(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleeping, "CHUNK_BYTES", 100_003)  # pieces begin and end anywhere
    engine = new_engine(tiny_model(family))
    before, content = answers(engine), content_of(engine)
    weights = sum(len(one) for one in content)
    assert weights > 100_003
    asleep = engine.sleep()
    assert asleep.num_bytes == weights
    assert storages_of([engine._decoder, engine.kv, engine._runner._parts], engine.kv.device) == []
    assert engine.kv.untyped_storage().nbytes() == 0
    engine.wake(asleep)
    assert not engine.kv.any()
    assert all(map(torch.equal, content, content_of(engine)))
    assert answers(engine) == before


def test_a_head_sleeps_too_and_what_was_captured_is_forgotten(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    settings, _ = drafter("draft_model", model, tmp_path)
    engine = new_engine(model, **settings)
    before, alone = answers(engine), sum(len(one) for one in content_of(engine))
    graphs, drafting = engine._runner.graphs, engine._drafting
    assert drafting is not None
    graphs.sizes, graphs._graphs = ["a size"], {"a size": Again(lambda: None)}  # type: ignore[list-item, dict-item]
    drafting._guesses._captured[1] = drafting._reading._captured["a size"] = None  # type: ignore[assignment, index]
    asleep = engine.sleep()
    assert asleep.num_bytes > alone
    assert (engine._runner.graphs.sizes, engine._runner.graphs._graphs) == ([], {})
    assert (drafting._guesses._captured, drafting._reading._captured) == ({}, {})
    engine.wake(asleep)
    assert answers(engine) == before


def test_without_room_in_host_memory_nothing_moves(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(tiny_model("llama"))
    before, forgotten = answers(engine), list[str]()

    def lacking(*shape: int, **options: object) -> torch.Tensor:
        raise RuntimeError("out of pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lacking)
        patch.setattr(engine, "_forget_graphs", functools.partial(forgotten.append, "graphs"))
        with pytest.raises(MemoryError, match=r"host memory has no room for 0 MiB of weights: out of pinned memory"):
            engine.sleep()
    assert forgotten == []
    assert answers(engine) == before


class _Lacking:
    """A storage whose device has no memory left, `times` times."""

    def __init__(self, storage: torch.UntypedStorage, times: int) -> None:
        self._storage, self._times, self.device = storage, times, storage.device

    def resize_(self, size: int) -> None:
        if size and self._times:
            self._times -= 1
            raise torch.OutOfMemoryError("out of memory")
        self._storage.resize_(size)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def test_without_room_on_the_device_it_sleeps_on_and_wakes_later() -> None:
    weights, pool = [torch.arange(1000.0), torch.ones(7, 3)], torch.ones(50)
    asleep = MovedOut.fallen([weights], pool)
    assert [one.untyped_storage().nbytes() for one in (*weights, pool)] == [0, 0, 0]
    asleep._pool = _Lacking(asleep._pool, 1)  # type: ignore[assignment]
    with pytest.raises(MemoryError, match="no room on cpu for what sleeps"):
        asleep.wake()
    assert [one.untyped_storage().nbytes() for one in (*weights, pool)] == [0, 0, 0]
    asleep._pool = asleep._pool._storage  # type: ignore[attr-defined]
    asleep.wake()
    assert torch.equal(weights[0], torch.arange(1000.0))
    assert torch.equal(weights[1], torch.ones(7, 3))
    assert not pool.any()


def test_tensors_are_found_in_closures_bound_methods_and_containers_each_once() -> None:
    class Layer:
        def __init__(self) -> None:
            self.inner = torch.ones(3)

        def __call__(self) -> torch.Tensor:
            return self.inner

    closed, default = torch.ones(4), torch.ones(5)

    def closure(its: torch.Tensor = default) -> tuple[torch.Tensor, torch.Tensor]:
        return closed, its

    layer = Layer()
    roots = [
        layer.__call__,
        functools.partial(closure),
        {"view": closed[1:]},
        (layer, {"meta": torch.ones(2, device="meta")}),
    ]
    found = storages_of(roots, torch.device("cpu"))
    assert sorted(one.nbytes() for one in found) == [12, 16, 20]


def test_what_others_know_by_address_stays() -> None:
    class Group:
        def __init__(self) -> None:
            self.inbox = torch.ones(6)

        def all_reduce(self) -> torch.Tensor:
            return self.inbox

    group, weight = Group(), torch.ones(4)
    layer = functools.partial(lambda add, of: of, group.all_reduce, weight)
    assert sorted(one.nbytes() for one in storages_of([layer], weight.device)) == [16, 24]
    assert [one.nbytes() for one in storages_of([layer], weight.device, [group])] == [16]
    moved = MovedOut.fallen([layer], torch.ones(9), stays=[group])
    assert moved.num_bytes == 16
    assert torch.equal(group.inbox, torch.ones(6))
    moved.wake()
    assert torch.equal(weight, torch.ones(4))
