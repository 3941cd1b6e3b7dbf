"""Engines and a served model that sleep on a card: its memory is free meanwhile, and answers go on as before. Prints seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.ranks.leading import leading
from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.parallel.group import RankLostError
from engine.weights.sleeping import MovedOut
from tests.e2e.stack import PATIENCE_S, up
from tests.gpu.waves import WITH_STATES
from tests.models import build_tiny_model
from tests.unit.engine.generate import Generator, new_sequence

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
NOISE_BYTES = 64 * MIB  # allocators take whole pages, and workspaces stay
POOL_BYTES = 4 << 30
PROMPTS = [[(31 * length + 7 * at + at * at) % 500 + 5 for at in range(length)] for length in (1, 16, 70, 200)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def answers(engine: Engine) -> list[list[int]]:
    sequences = [new_sequence(f"r{at}", prompt, max_tokens=30) for at, prompt in enumerate(PROMPTS)]
    return Generator(engine, chunk_size=90).run(sequences)


def check_naps(engine: Engine, kind: str, *, shares: float = 1.0, noise_bytes: int = NOISE_BYTES) -> None:
    """Sleep and wake twice; the card has `shares` of what one process has on it."""
    before, sizes, pool = answers(engine), engine._runner.graphs.sizes, engine.kv.nbytes
    assert sizes
    awake = free_bytes()
    for _ in range(2):
        began = time.perf_counter()
        asleep = engine.sleep()
        slept_s, freed = time.perf_counter() - began, free_bytes() - awake
        assert freed >= shares * (pool + asleep.num_bytes) - noise_bytes
        began = time.perf_counter()
        engine.wake(asleep)
        torch.cuda.synchronize()
        woke_s = time.perf_counter() - began
        print(f"{kind}: {freed >> 20} MiB freed in {slept_s:.2f} s, awake in {woke_s:.2f} s")
        assert engine._runner.graphs.sizes == sizes
        assert awake - free_bytes() < noise_bytes
        assert answers(engine) == before


@pytest.mark.parametrize("kind", ["demo", "draft_model", *WITH_STATES])
def test_an_engine_frees_the_card_and_answers_as_before_when_it_wakes(kind: str, tmp_path: Path) -> None:
    model, settings = ROOT / "demo", dict[str, Any]()
    if kind in WITH_STATES:
        model = WITH_STATES[kind].build(tmp_path)
    elif kind == "draft_model":
        model = build_tiny_model(tmp_path / "target", "llama", num_hidden_layers=3)
        build_tiny_model(tmp_path / "draft", "qwen3", num_key_value_heads=4)
        settings = {"draft": DraftConfig(folder=tmp_path / "draft", is_model=True, num_drafts=4)}
    cache = CacheConfig(kv_memory_bytes=POOL_BYTES)
    config = EngineConfig(model=model, device="cuda", dtype="float16", max_sequences=8, cache=cache, **settings)
    engine = Engine(config, allocate=lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device))
    check_naps(engine, kind)


@pytest.mark.parametrize("apart", [False, True], ids=["one card", "two cards"])
@pytest.mark.parametrize("kind", ["demo", "draft_model", "stages", "stages of ranks"])
def test_ranks_free_their_cards_and_answer_as_before_when_they_wake(kind: str, apart: bool, tmp_path: Path) -> None:
    if apart and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model, settings = ROOT / "demo", dict[str, Any]()
    if kind == "draft_model":
        model = build_tiny_model(tmp_path / "target", "llama", num_hidden_layers=3, num_key_value_heads=4)
        build_tiny_model(tmp_path / "draft", "qwen3", num_key_value_heads=4)
        settings = {"draft": DraftConfig(folder=tmp_path / "draft", is_model=True, num_drafts=4)}
    cache = CacheConfig(kv_memory_bytes=POOL_BYTES)
    # The second stage has a layer less. Where stages have ranks, all of a stage are on a card.
    width, shares = {"stages": (1, 1.5), "stages of ranks": (2, 3.0)}.get(kind, (2, 2.0))
    config = EngineConfig(
        model=model,
        device="cuda",
        dtype="float16",
        max_sequences=8,
        cache=cache,
        tensor_parallel_size=width,
        **settings,
    )
    are_stages, more = kind.startswith("stages"), width if kind == "stages of ranks" else 1
    shares = 1.0 * more if apart else shares
    cards = [0] * more + [int(apart)] * more
    with leading(cards, are_stages=are_stages, width=more) as ranks:
        engine = Engine(
            config, allocate=lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device), ranks=ranks
        )
        check_naps(engine, f"{kind} of two", shares=shares, noise_bytes=2 * NOISE_BYTES)
        asleep = engine.sleep()
        pid, *_ = ranks.followers.pids  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1"):
            engine.wake(asleep)
        assert "rank 1" in engine.lost


def test_weights_of_many_chunks_come_back_bit_for_bit() -> None:
    weights = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in (3 << 30, 1, 700 * MIB + 3)]
    pool, copies = torch.zeros(MIB, device="cuda"), [one.cpu() for one in weights]
    began = time.perf_counter()
    asleep = MovedOut.fallen([weights], pool)
    slept_s = time.perf_counter() - began
    assert not any(one.untyped_storage().nbytes() for one in (*weights, pool))
    began = time.perf_counter()
    asleep.wake()
    torch.cuda.synchronize()
    woke_s = time.perf_counter() - began
    print(f"{asleep.num_bytes / 1e9:.1f} GB out in {slept_s:.2f} s, in again in {woke_s:.2f} s")
    assert all(torch.equal(one.cpu(), copy) for one, copy in zip(weights, copies, strict=True))


async def test_a_served_model_is_parked_and_woken_by_a_request(tmp_path: Path) -> None:
    options = ("--model", str(ROOT / "demo"), "--device", "cuda", "--transport", "local", "--prefill", "0")
    options += ("--kv-memory-mb", str(POOL_BYTES >> 20), "--keep-alive", "5m")
    body = {"model": "demo", "prompt": PROMPTS[2], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    async with (
        up(None, tmp_path / "data", *options) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client,
    ):
        await stack.says("Baton serves demo")

        async def answer() -> list[int]:
            told = await client.post("/v1/completions", json=body | {"return_token_ids": True})
            assert told.status_code == 200, told.text
            tokens: list[int] = told.json()["choices"][0]["token_ids"]
            return tokens

        tokens, awake = await answer(), free_bytes()
        pids = {one.pid for one in stack.children("services.decode")}
        assert (await client.post("/sleep?model=demo")).status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            while (
                'baton_hosted_models{model_name="demo",status="parked"} 1.0' not in (await client.get("/metrics")).text
            ):
                await asyncio.sleep(0.05)
        assert free_bytes() - awake >= POOL_BYTES - NOISE_BYTES
        began = time.perf_counter()
        assert await answer() == tokens
        print(f"woken and answered in {time.perf_counter() - began:.2f} s")
        assert {one.pid for one in stack.children("services.decode")} == pids
