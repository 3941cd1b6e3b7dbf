"""Workers of several ranks, each a process, hand over to workers of other widths, and answer as one rank does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import redis.asyncio

from tests.e2e.asking import all_idle, complete, until, watching
from tests.e2e.wide import NEW_TOKENS, WideCluster, check
from tests.models import build_tiny_model
from tests.reference import greedy_tokens
from tests.unit.engine.drafters import drafter
from tests.unit.engine.families.catalogue import CASES

ANSWER = 100


async def test_a_worker_of_two_ranks_hands_over_to_one_of_one(tmp_path: Path) -> None:
    await check(tmp_path, prefill=2, decode=1)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "ucx"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
async def test_widths_hand_over_to_each_other(prefill: int, decode: int, transport: str, tmp_path: Path) -> None:
    """With four ranks the two key and value heads are replicated."""
    await check(tmp_path, prefill=prefill, decode=decode, transport=transport)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 4)])
async def test_four_heads_are_cut_into_halves_and_quarters(prefill: int, decode: int, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama", num_key_value_heads=4)
    await check(tmp_path, prefill=prefill, decode=decode, model=model)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "gemma3", "qwen3_next"])
async def test_windows_latents_and_states_are_handed_over(name: str, prefill: int, decode: int, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    options = {} if case.max_model_len is None else {"max_model_len": case.max_model_len}
    await check(tmp_path, prefill=prefill, decode=decode, model=case.build(tmp_path / name), **options)


@pytest.mark.long
@pytest.mark.parametrize(("name", "prefill", "decode"), [("eagle3", 1, 2), ("eagle3", 2, 1), ("draft_model", 1, 2)])
async def test_what_heads_and_draft_models_keep_is_handed_over(
    name: str, prefill: int, decode: int, tmp_path: Path
) -> None:
    model, folder = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=3), tmp_path / "draft"
    drafter(name, model, folder)
    told = {"method": name, "model": str(folder), "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    await check(tmp_path, prefill=prefill, decode=decode, model=model, speculative_config=json.dumps(told))


@pytest.mark.long
async def test_ranks_compute_again_what_had_to_give_way(tmp_path: Path) -> None:
    """Sequences are preempted and resumed: twelve answers would need 92 of 64 blocks."""
    model = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=12, num_key_value_heads=4)
    prompts = [[(31 * index + 7 * at) % 400 + 10 for at in range(40 + 9 * index)] for index in range(12)]
    options = {"kv_memory_mb": 1, "max_batch_tokens": 64}
    widths = {"prefill-0": 1, "decode-0": 2}
    async with (
        WideCluster(tmp_path / "run", model=model, widths=widths, **options) as cluster,
        watching(cluster) as (_, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        answers = await asyncio.gather(*(complete(client, prompt, max_tokens=60) for prompt in prompts))
        await until(peers, lambda states: any(state.totals.preemptions for state in states))
    assert [answer["tokens"] for answer in answers] == greedy_tokens(model, prompts, 60)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4)])
async def test_the_next_turn_pulls_from_a_worker_of_another_width(prefill: int, decode: int, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    prompt, widths = list(range(30, 132)), {"prefill-0": prefill, "decode-0": decode}
    turn = prompt + greedy_tokens(model, [prompt], ANSWER)[0]
    second = [*turn, 7, 8, 9]
    async with (
        WideCluster(tmp_path / "run", model=model, widths=widths, pull_s=60) as cluster,
        watching(cluster) as (_, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
    ):
        first = await complete(client, prompt, max_tokens=ANSWER)
        async with redis.asyncio.Redis.from_url(cluster.redis.url) as store, asyncio.timeout(60):
            while len([key async for key in store.scan_iter("baton:block:*")]) < (len(turn) - 1) // 16:
                await asyncio.sleep(0.05)
        answer = await complete(client, second, max_tokens=NEW_TOKENS)
        await until(peers, lambda states: any(state.totals.pulls.tokens for state in states) and all_idle(states))
        pulls = [state.totals.pulls for state in peers.states.values()]
    assert [*prompt, *first["tokens"]] == turn
    assert [answer["tokens"]] == greedy_tokens(model, [second], NEW_TOKENS)
    assert sum(each.failed + each.bad_digests for each in pulls) == 0
