"""Drafts for SmolLM2 through a prefill and a decode worker apart: by `demo/draft`, trained on its answers, and by itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import client_of, until, watching
from tests.e2e.cluster import ROOT, Cluster
from tests.real.asking import QUESTIONS, ask, said

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]
HEAD = {
    "method": "eagle3",
    "model": str(ROOT / "demo" / "draft"),
    "num_speculative_tokens": 3,
    "enable_adaptive_verification": False,  # whatever steps take on a busy machine
}
LEAST_TOKENS_A_STEP = 1.3  # 1.8 were measured: below this it reads what it was not trained on
LEAST_OF_ITSELF = 2.0  # all four of a greedy step, and some of a drawn one


@pytest.mark.parametrize(("kind", "least"), [("head", LEAST_TOKENS_A_STEP), ("itself", LEAST_OF_ITSELF)])
async def test_drafts_are_accepted_and_change_no_text(
    smollm2: Path, client: httpx.AsyncClient, kind: str, least: float, tmp_path: Path
) -> None:
    plain = await _answers(client)
    itself = {"method": "draft_model", "model": str(smollm2)}
    settings = json.dumps(HEAD | (itself if kind == "itself" else {}))
    async with Cluster(
        tmp_path, model=smollm2, dtype="float32", kv_memory_mb=192, speculative_config=settings
    ) as cluster:
        async with client_of(cluster) as drafting, watching(cluster) as (_, peers):
            assert await _answers(drafting) == plain
            # Heartbeats tell of them a little later.
            await until(peers, lambda states: sum(state.totals.drafts for state in states) > len(QUESTIONS))
            totals = [state.totals for state in peers.states.values()]
    drafts, accepted = sum(one.drafts for one in totals), sum(one.accepted_tokens for one in totals)
    assert 1 + accepted / drafts >= least, (drafts, accepted)


async def _answers(client: httpx.AsyncClient) -> list[str]:
    """Greedy and seeded ones, all asked at once."""
    asked = [
        ask(client, question, max_tokens=48, temperature=temperature, seed=7)
        for question in QUESTIONS
        for temperature in (0, 1)
    ]
    return [said(answer) for answer in await asyncio.gather(*asked)]
