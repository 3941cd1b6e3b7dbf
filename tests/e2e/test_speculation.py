"""Speculation through separate processes: the same tokens as without, whatever is asked, and when a worker dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import FAKE, all_idle, client_of, complete, expected, until, watching
from tests.e2e.cluster import ROOT, Cluster
from tests.models import build_tiny_model
from tests.unit.engine.dflash_reference import write_dflash
from tests.unit.engine.eagle3_reference import write_head
from tests.unit.engine.mtp_reference import FAMILIES

CONFIG = {"method": "suffix", "num_speculative_tokens": 6, "enable_adaptive_verification": False}
DRAFTING = {"speculative_config": json.dumps(CONFIG)}  # whatever steps take on a busy machine
COPY = "Repeat after me: the harbour is quiet, the harbour is grey, the harbour is quiet, the harbour is grey,"
SCHEMA = {
    "type": "object",
    "properties": {"harbour": {"enum": ["quiet", "grey"]}, "boats": {"type": "integer"}},
    "required": ["harbour", "boats"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 1, "seed": 8, "top_p": 0.9, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1, "seed": 9, "logit_bias": {"300": 3}, "min_tokens": 20},
    {"temperature": 1, "seed": 3, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
]  # fmt: skip


async def _answers(cluster: Cluster) -> list[Any]:
    """The choices of every request, all asked at once, and once more."""
    async with client_of(cluster) as client:
        return [await asyncio.gather(*(_answer(client, options) for options in ASKED)) for _ in range(2)]


async def _answer(client: httpx.AsyncClient, options: dict[str, Any]) -> list[Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": COPY}], "max_tokens": 48}
    response = await client.post("/v1/chat/completions", json=body | options)
    assert response.status_code == 200, response.text
    return [
        (choice["message"]["content"], choice["finish_reason"], _tokens(choice))
        for choice in response.json()["choices"]
    ]


def _tokens(choice: dict[str, Any]) -> list[str]:
    return [each["token"] for each in (choice.get("logprobs") or {}).get("content", [])]


async def test_whatever_is_asked_the_answers_are_those_without_drafts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": ROOT / "demo", "dtype": "float32"}
    async with Cluster(tmp_path / "plain", **options) as cluster:
        plain = await _answers(cluster)
    async with Cluster(tmp_path / "drafting", decode=2, **options, **DRAFTING) as cluster:
        async with watching(cluster) as (_, peers):
            async with asyncio.timeout(120.0):
                accepted = 0
                while (
                    accepted <= 50
                ):  # fewer in a round where most passes overlap: a sequence drafts without a pending token
                    assert await _answers(cluster) == plain
                    await until(peers, all_idle)
                    accepted = sum(state.totals.accepted_tokens for state in peers.states.values())


async def test_a_request_predicts_its_answer_or_wants_no_drafts(tmp_path: Path) -> None:
    """Usage tells of the drafts that were verified: most of a right prediction, none where none are wanted."""
    options: dict[str, Any] = {"model": ROOT / "demo", "dtype": "float32"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": COPY}], "max_tokens": 64, "temperature": 0}
    async with Cluster(tmp_path, **options, **DRAFTING) as cluster, client_of(cluster) as client:

        async def asked(**more: Any) -> tuple[str, dict[str, int], dict[str, Any]]:
            answer = (await client.post("/v1/chat/completions", json=body | {"timings_per_token": True} | more)).json()
            details = answer["usage"]["completion_tokens_details"] | {"all": answer["usage"]["completion_tokens"]}
            return answer["choices"][0]["message"]["content"], details, answer["timings"]

        text, details, timings = await asked(speculation=False)
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
        assert "draft_n" not in timings
        again, details, timings = await asked(prediction={"type": "content", "content": text})
        assert again == text
        assert details["accepted_prediction_tokens"] > details["all"] / 2
        assert timings["draft_n_accepted"] == details["accepted_prediction_tokens"]
        assert timings["draft_n"] == timings["draft_n_accepted"] + details["rejected_prediction_tokens"]


@pytest.mark.long
async def test_a_decode_worker_that_dies_while_it_drafts_is_replaced_without_a_wrong_token(
    model: Path, tmp_path: Path
) -> None:
    count, prompt = 400, [9] * 50
    slow = {**FAKE, **DRAFTING, "fake_step_ms": 20}
    async with Cluster(tmp_path, model=model, decode=2, **slow) as cluster:
        async with client_of(cluster) as client, watching(cluster) as (_, peers):
            answer = expected(model, prompt, count)
            first = await asyncio.gather(*(complete(client, prompt, max_tokens=count) for _ in range(2)))
            assert [each["tokens"] for each in first] == [answer, answer]
            # Both workers know the answer now, so that of the next ones most tokens are drafted.
            asking = [asyncio.create_task(complete(client, prompt, max_tokens=count)) for _ in range(4)]
            await until(peers, lambda states: sum(state.running for state in states) > 1)
            busy = max(peers.states.values(), key=lambda state: state.running)
            cluster.kill(busy.worker)
            assert [each["tokens"] for each in await asyncio.gather(*asking)] == [answer] * 4
            alive = [state for state in peers.states.values() if state.worker != busy.worker]
            assert sum(state.totals.accepted_tokens for state in alive) > 0


def _three_layers(folder: Path) -> Path:
    return build_tiny_model(folder / "target", "llama", num_hidden_layers=3)


def _eagle3(folder: Path, *form: str) -> tuple[Path, dict[str, str]]:
    write_head(folder / "head", *form)
    return _three_layers(folder), {"method": "peagle" if form else "eagle3", "model": str(folder / "head")}


def _own_layer(folder: Path) -> tuple[Path, dict[str, str]]:
    """A hybrid's, whose states go on behind the accepted tokens."""
    return FAMILIES["qwen3_5"].build(folder), {"method": "mtp"}


def _blocks(folder: Path, method: str, *form: str) -> tuple[Path, dict[str, str]]:
    write_dflash(folder / "head", *form)
    return _three_layers(folder), {"method": method, "model": str(folder / "head")}


def _small_model(folder: Path) -> tuple[Path, dict[str, str]]:
    """Another model with one tokenizer, whose heads have other shapes: a weak drafter."""
    small = build_tiny_model(folder / "small", "qwen3", num_key_value_heads=4)
    return _three_layers(folder), {"method": "draft_model", "model": str(small)}


DRAFTERS: dict[str, Callable[[Path], tuple[Path, dict[str, str]]]] = {
    "eagle3": _eagle3,
    "peagle": lambda folder: _eagle3(folder, "parallel", "two_layers"),
    "mtp": _own_layer,
    "dflash": lambda folder: _blocks(folder, "dflash", "window"),
    "dspark": lambda folder: _blocks(folder, "dspark", "dspark", "anchor"),
    "draft_model": _small_model,
}


@pytest.mark.quick("eagle3")  # each is handed over within a process, too: tests/unit/engine
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_no_drafter_changes_anything_across_the_handoff(drafter: str, tmp_path: Path) -> None:
    """The prefill worker's drafts come with the handoff, and its head's keys and values with the blocks."""
    model, speculation = DRAFTERS[drafter](tmp_path)
    await _check_head(model, speculation, tmp_path)


@pytest.mark.long
async def test_a_draft_model_changes_nothing_where_blocks_run_out_and_a_worker_dies(tmp_path: Path) -> None:
    """The model drafts for itself, so greedy drafts are accepted to their end."""
    model = build_tiny_model(tmp_path / "target", "llama", num_hidden_layers=3)
    drafting = {"method": "draft_model", "model": str(model), "enable_adaptive_verification": False}
    prompts = [[(31 * index + 7 * at) % 400 + 10 for at in range(20 + 9 * index)] for index in range(12)]
    options: dict[str, Any] = {"model": model, "dtype": "float32"}
    async with Cluster(tmp_path / "plain", **options) as cluster, client_of(cluster) as client:
        asked = [
            complete(client, prompt, temperature=at % 2, seed=5, max_tokens=300) for at, prompt in enumerate(prompts)
        ]
        plain = [answer["tokens"] for answer in await asyncio.gather(*asked)]
    options |= {"decode": 2, "kv_memory_mb": 1, "speculative_config": json.dumps(drafting)}
    async with Cluster(tmp_path / "drafting", **options) as cluster, client_of(cluster) as client:
        async with watching(cluster) as (_, peers):
            asking = [
                asyncio.create_task(complete(client, prompt, temperature=at % 2, seed=5, max_tokens=300))
                for at, prompt in enumerate(prompts)
            ]
            await until(peers, lambda states: sum(state.totals.accepted_tokens for state in states) > 40)
            busy = max(peers.states.values(), key=lambda state: state.running)
            cluster.kill(busy.worker)
            assert [answer["tokens"] for answer in await asyncio.gather(*asking)] == plain
            alive = [state for state in peers.states.values() if state.worker != busy.worker]
            assert sum(state.totals.accepted_tokens for state in alive) > 40
            await until(peers, lambda states: sum(state.totals.preemptions for state in states) > 0)


async def _check_head(model: Path, head: dict[str, Any], folder: Path) -> None:
    """Compare greedy and drawn answers, and once more where prompts are cached."""
    prompts = [[(31 * index + 7 * at) % 400 + 10 for at in range(20 + 9 * index)] for index in range(6)]
    config = json.dumps(head | {"enable_adaptive_verification": False})

    async def answers(cluster: Cluster) -> list[object]:
        async with client_of(cluster) as client:
            asked = [
                complete(client, prompt, temperature=temperature, seed=5, max_tokens=32)
                for prompt in prompts
                for temperature in (0, 1)
            ]
            return [answer["tokens"] for answer in await asyncio.gather(*asked)]

    async with Cluster(folder / "plain", model=model, dtype="float32") as cluster:
        plain = await answers(cluster)
    async with Cluster(folder / "drafting", model=model, dtype="float32", speculative_config=config) as cluster:
        async with watching(cluster) as (_, peers):
            assert await answers(cluster) == plain
            assert await answers(cluster) == plain
            assert {state.drafter for state in peers.states.values()} == {head["method"]}
            await until(peers, lambda states: sum(state.totals.drafted_tokens for state in states) > 0)
