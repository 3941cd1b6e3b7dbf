"""A working set larger than pool and host memory, in separate processes: a worker that is killed finds its files again."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.asking import client_of, until, watching
from tests.e2e.cluster import Cluster
from tests.e2e.evicting import NUM_TOKENS, asked, asked_until_answered
from tests.models import build_tiny_model
from tests.reference import greedy_tokens

# Pool and host memory have 128 blocks each; these prompts take 384.
PROMPTS = [[(31 * index + 7 * at + at * at) % 400 + 10 for at in range(250)] for index in range(24)]


async def test_a_killed_worker_finds_its_files_again(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    expected = greedy_tokens(model, PROMPTS, NUM_TOKENS)
    options = {"kv_memory_mb": 1, "kv_host_mb": 1, "kv_disk": f"{tmp_path}/kv:64", "max_batch_tokens": 64}
    async with (
        Cluster(tmp_path / "run", model=model, prefill=1, **options) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        for _ in range(3):
            assert [tokens for tokens, _ in [await asked(client, prompt) for prompt in PROMPTS]] == expected
        await until(peers, lambda states: any(state.totals.disk.stored_blocks for state in states))
        cluster.kill("prefill-0")
        await cluster.processes["prefill-0"].wait()
        await cluster.start("prefill-0")
        await cluster.until_ready()
        answers = [await asked_until_answered(client, prompt) for prompt in PROMPTS]
        assert [tokens for tokens, _ in answers] == expected
        await until(peers, lambda states: any(s.totals.disk.hit_tokens for s in states if s.worker == "prefill-0"))
        await until(
            peers, lambda states: all(s.free_blocks == s.region.layout.num_blocks and not s.held_blocks for s in states)
        )
