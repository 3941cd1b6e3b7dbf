"""A working set larger than pool and host memory, in separate processes: a worker that is killed finds its files again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.asking import client_of, until, watching
from tests.e2e.evicting import NUM_TOKENS, asked, asked_until_answered
from tests.e2e.wide import WideCluster
from tests.models import build_tiny_model
from tests.reference import greedy_tokens

# Pool and host memory have 128 blocks each; these prompts take 384.
PROMPTS = [[(31 * index + 7 * at + at * at) % 400 + 10 for at in range(250)] for index in range(24)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "ranks", "prefill"),
    [
        ("prefill-0", "widths", 1, 1),
        pytest.param("decode-0", "widths", 2, 0, marks=pytest.mark.long),
        pytest.param("decode-0", "depths", 2, 0, marks=pytest.mark.long),
    ],
)
async def test_a_killed_worker_finds_its_files_again(
    name: str, kind: str, ranks: int, prefill: int, tmp_path: Path
) -> None:
    """Each of two ranks, or stages, has its part of a block, in a folder of its own: pools of 256 blocks."""
    model = build_tiny_model(tmp_path / "llama", "llama", **({"num_hidden_layers": 3} if kind == "depths" else {}))
    expected = greedy_tokens(model, PROMPTS, NUM_TOKENS)
    options = {"kv_memory_mb": 1, "kv_host_mb": 1, "kv_disk": f"{tmp_path}/kv:64", "max_batch_tokens": 64}
    async with (
        WideCluster(tmp_path / "run", model=model, prefill=prefill, **options, **{kind: {name: ranks}}) as cluster,  # type: ignore[arg-type]
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        for _ in range(3):
            assert [tokens for tokens, _ in [await asked(client, prompt) for prompt in PROMPTS]] == expected
        await until(peers, lambda states: any(state.totals.disk.stored_blocks for state in states))
        cluster.kill(name)
        await cluster.processes[name].wait()
        await cluster.start(name)
        await cluster.until_ready()
        answers = [await asked_until_answered(client, prompt) for prompt in PROMPTS]
        assert [tokens for tokens, _ in answers] == expected
        await until(peers, lambda states: any(s.totals.disk.hit_tokens for s in states if s.worker == name))
        await until(
            peers, lambda states: all(s.free_blocks == s.region.layout.num_blocks and not s.held_blocks for s in states)
        )
