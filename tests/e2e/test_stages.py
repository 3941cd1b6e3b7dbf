"""Workers of several stages, each a process, hand over to workers of other depths and widths, and answer as one process does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import all_idle, complete, until, watching
from tests.e2e.wide import WideCluster, check
from tests.models import build_tiny_model
from tests.reference import greedy_tokens
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.rank_drafts import config_of

STAGES, RANKS = True, False
ALIKE = ["--disable-hybrid-kv-cache-manager"]


@pytest.mark.long  # on two nodes: test_nodes.py
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_worker_of_two_stages_hands_over_to_one_process(ranks: int, tmp_path: Path) -> None:
    await check(tmp_path, prefill=2, decode=1, are_stages=(STAGES, STAGES if ranks == 1 else RANKS), within=ranks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("are_stages", "prefill", "decode"),
    [((RANKS, STAGES), 1, 2), ((RANKS, STAGES), 2, 2), ((STAGES, STAGES), 2, 2), ((STAGES, RANKS), 2, 4)],
)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
async def test_stages_of_several_ranks_hand_over(
    name: str, are_stages: tuple[bool, bool], prefill: int, decode: int, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    fields = {key: value for key, value in case.fields.items() if key != "layer_types"} | {"num_hidden_layers": 8}
    model = replace(case, fields=fields).build(tmp_path / "model")
    options = {} if case.max_model_len is None else {"max_model_len": case.max_model_len}
    flags = ["--block-size", "32"]  # the smaller keys of a rank would ask for larger blocks
    await check(
        tmp_path, prefill=prefill, decode=decode, model=model, are_stages=are_stages, within=2, flags=flags, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "ucx"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 2), (2, 4), (4, 2), (3, 2), (1, 4)])
async def test_depths_hand_over_to_each_other(prefill: int, decode: int, transport: str, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=5)
    await check(tmp_path, prefill=prefill, decode=decode, model=model, are_stages=(STAGES, STAGES), transport=transport)


@pytest.mark.long
@pytest.mark.parametrize("are_stages", [(STAGES, RANKS), (RANKS, STAGES)])
async def test_stages_and_ranks_hand_over_to_each_other(are_stages: tuple[bool, bool], tmp_path: Path) -> None:
    await check(tmp_path, prefill=2, decode=2, are_stages=are_stages)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "gemma3", "mixtral"])
async def test_windows_latents_and_experts_are_handed_over(
    name: str, prefill: int, decode: int, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    options = {} if case.max_model_len is None else {"max_model_len": case.max_model_len}
    model = case.build(tmp_path / name)
    await check(
        tmp_path, prefill=prefill, decode=decode, model=model, are_stages=(STAGES, STAGES), flags=ALIKE, **options
    )


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
async def test_windows_in_blocks_of_their_own_are_handed_over(prefill: int, decode: int, tmp_path: Path) -> None:
    """With three layers of each kind, of which the stages have 2 and 1, and 1 and 2: an entry has more blocks than alone."""
    case = next(case for case in CASES if case.name == "gpt_oss")
    fields = {key: value for key, value in case.fields.items() if key != "layer_types"} | {"num_hidden_layers": 6}
    model = replace(case, fields=fields).build(tmp_path / "model")
    await check(
        tmp_path, prefill=prefill, decode=decode, model=model, are_stages=(STAGES, STAGES), flags=["--block-size", "8"]
    )


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
async def test_states_are_handed_over(name: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """Each stage has those of its layers: in Qwen3-Next of three of four, beside the keys and values of the fourth."""
    case = next(case for case in CASES if case.name == name)
    fields = {key: value for key, value in case.fields.items() if key != "layer_types"} | {"num_hidden_layers": 16}
    model = replace(case, fields=fields).build(tmp_path / name)
    await check(tmp_path, prefill=prefill, decode=decode, model=model, are_stages=(STAGES, STAGES))


@pytest.mark.long
@pytest.mark.parametrize("are_stages", [(STAGES, RANKS), (RANKS, STAGES)])
async def test_states_go_between_stages_and_ranks(are_stages: tuple[bool, bool], tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen3_next")
    fields = {key: value for key, value in case.fields.items() if key != "layer_types"} | {"num_hidden_layers": 8}
    model = replace(case, fields=fields).build(tmp_path / "model")
    flags = ["--block-size", "32"]  # the smaller keys of a rank would ask for larger blocks
    await check(tmp_path, prefill=2, decode=2, model=model, are_stages=are_stages, flags=flags)


@pytest.mark.long  # in threads of one process: tests/unit/engine/test_stage_drafts.py
@pytest.mark.parametrize(("prefill", "decode", "within"), [(2, 2, 1), (1, 2, 1), (3, 1, 1), (2, 4, 1), (2, 2, 2)])
async def test_first_stages_draft_and_what_drafters_keep_is_handed_over(
    prefill: int, decode: int, within: int, tmp_path: Path
) -> None:
    """The model drafts for itself, so greedy drafts are accepted to their end."""
    model = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=5)
    told = {"method": "draft_model", "model": str(model), "enable_adaptive_verification": False}
    prompts = [[(31 * index + 7 * at) % 400 + 10 for at in range(20 + 9 * index)] for index in range(8)]
    depths = {"prefill-0": prefill, "decode-0": decode}
    options = {"dtype": "float32", "speculative_config": json.dumps(told), "max_batch_tokens": 64}
    async with (
        WideCluster(
            tmp_path / "run", model=model, depths=depths, widths=dict.fromkeys(depths, within), **options
        ) as cluster,
        watching(cluster) as (_, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
    ):
        ask = partial(complete, client, max_tokens=32)
        answers = [*await asyncio.gather(*map(ask, prompts)), *await asyncio.gather(*map(ask, prompts))]
        await until(peers, lambda states: len(states) == 2 and all_idle(states))
        totals = {name: state.totals for name, state in peers.states.items()}
    assert [answer["tokens"] for answer in answers] == 2 * greedy_tokens(model, prompts, 32)
    assert totals["decode-0"].refused_handoffs == 0
    assert totals["decode-0"].accepted_tokens > len(answers) * 16
    assert totals["decode-0"].accepted_tokens > 0.9 * totals["decode-0"].drafted_tokens


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3"])
async def test_a_model_s_own_layer_drafts_in_first_stages(name: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """Its keys and values, or latents, are handed over beside the model's, and the states of a hybrid."""
    config = config_of(name, tmp_path / "checkpoint", layers=8)
    drafting = json.dumps({"method": "mtp", "enable_adaptive_verification": False})
    await check(
        tmp_path,
        prefill=prefill,
        decode=decode,
        model=config.model,
        are_stages=(STAGES, STAGES),
        flags=["--block-size", "32"],
        speculative_config=drafting,
        max_model_len=256,
    )
