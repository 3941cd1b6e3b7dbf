# mypy: allow-untyped-calls
"""What no card has tried, on one that isn't there: see `card` and `dry`."""

# ruff: noqa: E402 (these imports fail where triton is missing)

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.needs import needs

needs("triton")

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.kernels import triton_norm
from tests.gpu.waves import WITH_STATES, run_both_ways
from tests.unit.engine.families import foreign
from tests.unit.engine.families.case import Case
from tests.unit.engine.rank_drafts import config_of, streamed
from tests.unit.kernels import dry
from tests.unit.kernels.card import CARD, Card, CardError, made_up

PARTS = 16
TIMEOUT_S = 1800
FEW_GRAPHS = {"max_sequences": 12, "max_batch_tokens": 256}
QUICK = (
    "qwen3_5",
    "llama, real heads, fp8 while loading",
    "checkpoint of awq, experts",
    "llama, 2 stages",
)


@pytest.mark.quick("qwen3_5", "checkpoint of awq, experts")
@pytest.mark.parametrize("name", QUICK)
def test_an_engine_runs_on_a_card(name: str) -> None:
    program = dry.programs()[name]
    assert not dry.run({name: replace(program, asked={**program.asked, **FEW_GRAPHS})})


@pytest.mark.long
@pytest.mark.parametrize("name", ["eagle3", pytest.param("draft_model", marks=pytest.mark.long)])
def test_a_first_stage_drafts_on_a_card_beside_later_passes(name: str, tmp_path: Path) -> None:
    """In a thread of its own; whoever launches passes waits for nothing but results. Each pass draws token 7, and guesses 0."""
    config, launches = config_of(name, tmp_path, layers=7), dry.Launches(7)
    with dry.dry(launches) as card:
        sizes = {"device": "cuda", "dtype": "bfloat16", **FEW_GRAPHS}
        stages = Engine(replace(config, **sizes), ranks=dry.Led(1, 2, card, rank=1).ranks)
        assert stages.draft_ms
        with card.must_not_wait():
            answers, results, accepted = streamed(stages, count=3)
    assert {token for answer in answers for token in answer[-14:]} == {7}
    drafts = [each.drafts for each in chain(*results.values()) if each is not None and each.drafts]
    assert len(drafts) > 3 * 14
    assert set(chain(*drafts)) == {0}
    assert set(accepted) == {0}
    assert not launches.wrong


def test_scales_of_the_smallest_blocks_begin_anywhere(tmp_path: Path) -> None:
    """A layer's begin 8 bytes after those of the one before."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 72}
    model, launches = Case(name="llama", config="LlamaConfig", fields=heads).build(tmp_path), dry.Launches()
    with dry.dry(launches):
        Engine(
            EngineConfig(
                model=model,
                device="cuda",
                dtype="bfloat16",
                **FEW_GRAPHS,
                cache=CacheConfig(num_blocks=300, block_size=1, kv_cache_dtype="int8"),
            )
        )
    assert launches.count > 500
    assert not launches.wrong


@pytest.mark.quick("bfloat16-")
@pytest.mark.parametrize(("dtype", "obstacle"), [("bfloat16", ""), ("float16", "wait for the GPU: .*grouped_mm")])
def test_models_of_transformers_are_captured_where_nothing_waits(
    dtype: str, obstacle: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups' products in float16 are a loop on the host in torch."""
    case = next(case for case in foreign.CASES if case.name == "by transformers: qwen3_moe")
    launches, cache = dry.Launches(), CacheConfig(num_blocks=300)
    model = case.build(tmp_path)
    with dry.dry(launches) as card:
        engine = Engine(
            EngineConfig(model=model, device="cuda", dtype=dtype, model_impl=case.model_impl, **FEW_GRAPHS, cache=cache)
        )
        assert card.sync_debug_mode == 0
    whys = [vars(record)["why"] for record in caplog.records if record.message == "engine.not_captured"]
    assert bool(engine._runner.graphs.sizes) == (not obstacle)
    assert len(whys) == bool(obstacle)
    assert all(re.search(obstacle, why) for why in whys)


@pytest.mark.long
@pytest.mark.parametrize("family", WITH_STATES)
def test_graphs_with_states_are_replayed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tests/gpu/test_graphs.py` does begins and ends on a card."""
    model, launches = WITH_STATES[family].build(tmp_path), dry.Launches(token=5)
    with dry.dry(launches):
        run_both_ways(
            Engine(
                EngineConfig(
                    model=model, device="cuda", dtype="float16", max_sequences=32, cache=CacheConfig(num_blocks=600)
                )
            ),
            monkeypatch,
        )
    assert launches.count > 500
    assert not launches.wrong


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_engine_runs_on_a_card(part: int) -> None:
    command = [sys.executable, "-m", "tests.unit.kernels.dry", f"{part}/{PARTS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def on_card(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda")


def captured(card: Card, act: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph


def two_devices(card: Card) -> None:
    on_card(3) + torch.ones(3)


def an_index_of_the_cpu(card: Card) -> None:
    on_card(3)[torch.tensor([1])]


def a_number_within_a_pass(card: Card) -> None:
    with card.must_not_wait():
        on_card(3).sum().item()


def a_mask_in_a_graph(card: Card) -> None:
    x = on_card(3)
    captured(card, lambda: x[x > 0])


def a_list_within_a_pass(card: Card) -> None:
    with card.must_not_wait():
        torch.tensor([1, 2], device="cuda")


def a_copy_in_a_graph(card: Card) -> None:
    x, pinned = on_card(3), torch.empty(3, pin_memory=True)
    captured(card, lambda: x.copy_(pinned, non_blocking=True))


def memory_that_goes(card: Card) -> None:
    kept, lost = on_card(3), [on_card(3)]
    graph = captured(card, lambda: kept.add_(lost[0]))
    graph.replay()  # it is still there
    lost.clear()
    graph.replay()


def a_copy_into_common_memory(card: Card) -> None:
    torch.empty(3).copy_(on_card(3), non_blocking=True)


def a_buffer_that_is_filled_again(card: Card) -> None:
    pinned, over = torch.zeros(3, pin_memory=True), torch.cuda.Event()
    on_card(3).copy_(pinned, non_blocking=True)
    pinned.fill_(1.0)
    over.record()
    over.synchronize()


def a_kernel_on_the_cpu(card: Card) -> None:
    triton_norm._NORM.launch((1,), "a", on_card(3), torch.zeros(3))


def a_high_grid(card: Card) -> None:
    triton_norm._NORM.launch((1, 65536), "a", on_card(3))


def eight_bits_in_rows(card: Card) -> None:
    a, b = (torch.zeros(32, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(32, 1, device="cuda"), torch.ones(1, 32, device="cuda")
    torch._scaled_mm(a, b.T.contiguous(), *scales, out_dtype=torch.bfloat16)


WRONG: dict[Callable[[Card], None], str] = {
    two_devices: "1 of 2 tensors are on the CPU",
    an_index_of_the_cpu: "an index of the CPU",
    a_number_within_a_pass: "aten.item.default waits",
    a_mask_in_a_graph: "a mask, .* waits .* while a graph is captured",
    a_list_within_a_pass: "a copy waits",
    a_copy_in_a_graph: "between host and card is captured",
    memory_that_goes: "1 tensors that nobody has kept",
    a_copy_into_common_memory: "memory that isn't pinned, without waiting",
    a_buffer_that_is_filled_again: "written anew before",
    a_kernel_on_the_cpu: "_norm: argument 1 is on the CPU",
    a_high_grid: r"_norm: a grid of \(1, 65536\)",
    eight_bits_in_rows: "the second is not in columns",
}


@pytest.mark.parametrize("act", WRONG, ids=lambda act: act.__name__)
def test_a_card_refuses(act: Callable[[Card], None]) -> None:
    with made_up(lambda *launch: None) as card, pytest.raises(CardError, match=WRONG[act]):
        act(card)


def test_a_card_computes() -> None:
    with made_up(lambda *launch: None) as card:
        x = torch.arange(6, device="cuda").float().view(2, 3)
        assert x.is_cuda
        assert x.device == CARD
        with card.must_not_wait():
            x[0] += 1
            back, over = torch.empty(2, 3, pin_memory=True), torch.cuda.Event()
            back.copy_(x, non_blocking=True)
            over.record()
            assert back.isnan().all(), "it is not there yet"
            over.synchronize()
            assert back.tolist() == [[1, 2, 3], [3, 4, 5]]
        assert (x.T @ x).cpu().tolist() == [[10, 14, 18], [14, 20, 26], [18, 26, 34]]
        assert x.sum().item() == 18


def test_one_key_for_two_programs_is_told() -> None:
    """A planted bug: norms that add partial sums and those that don't have the same key."""
    launch = Card.launch

    def without(card: Card, kernel: Any, grid: tuple[int, ...], variant: Any, *given: Any, **named: Any) -> None:
        variant = variant[:1] if kernel is triton_norm._NORM else variant
        launch(card, kernel, grid, variant, *given, **named)

    def norms(card: Card) -> None:
        x, residual, weight = on_card(4, 64), on_card(4, 64), on_card(64)
        triton_norm.rms_norm(x, weight, 1e-6)
        triton_norm.add_and_norm(x, residual, weight, 1e-6)

    found = []
    for patch in (mock.patch.object(Card, "launch", Card.launch), mock.patch.object(Card, "launch", without)):
        launches = dry.Launches()
        with patch, dry.dry(launches) as card:
            norms(card)
        assert launches.count == 2
        found.append(list(launches.wrong))
    assert found == [[], ["_norm: PARTS: ('constexpr', 0), then ('constexpr', 1)"]]
