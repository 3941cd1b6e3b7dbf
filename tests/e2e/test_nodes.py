"""Workers whose stages are on several nodes, with a memory each, answer as one process does, and end with any of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from common import subjects
from common.messages import frame_decoder
from common.words import WorkerStatus
from tests.e2e.asking import all_idle, complete, until, watching
from tests.e2e.wide import WideCluster, check, ended
from tests.models import build_tiny_model
from tests.reference import greedy_tokens
from tests.unit.engine.drafters import drafter
from tests.unit.engine.families.catalogue import CASES
from worker.worker import EXIT_DEVICE_BROKEN

LOST = EXIT_DEVICE_BROKEN
BOUND_S = 60.0
PROMPTS = [[(17 * index + 5 * at) % 400 + 10 for at in range(9 + 40 * index)] for index in range(4)]
NEW_TOKENS = 60
STAGES, RANKS = True, False


def _worker_of_both_roles(folder: Path, name: str, model: Path, nodes: int = 2) -> WideCluster:
    """A cluster of one worker, with a stage on each node."""
    sizes = {name: nodes}
    return WideCluster(
        folder / "run", model=model, depths=sizes, nodes=sizes, decode=0, prefill=0, both=1, transport="ucx"
    )


async def test_stages_on_two_nodes_hand_over_to_one_process(tmp_path: Path) -> None:
    """Each node has the model in a folder of its own."""
    model, name = build_tiny_model(tmp_path / "llama", "llama"), "prefill-0"
    copy = shutil.copytree(model, tmp_path / "another host" / "llama")
    await check(
        tmp_path,
        prefill=2,
        decode=1,
        model=model,
        are_stages=(STAGES, RANKS),
        nodes={name: 2},
        others={f"{name}.1": ("tiny", copy)},
        transport="ucx",
    )


@pytest.mark.long
async def test_stages_on_two_nodes_sleep_and_wake_together(tmp_path: Path) -> None:
    model, name = build_tiny_model(tmp_path / "llama", "llama"), "worker-0"
    async with (
        _worker_of_both_roles(tmp_path, name, model) as cluster,
        watching(cluster) as (_, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        answers = [await complete(client, PROMPTS[0], max_tokens=NEW_TOKENS)]
        for number, status in ((signal.SIGUSR1, WorkerStatus.SLEEPING), (signal.SIGUSR2, WorkerStatus.READY)) * 2:
            cluster.processes[name].send_signal(number)
            await until(peers, lambda states, its=status: [state.status for state in states] == [its])  # type: ignore[misc]
        answers += [await complete(client, PROMPTS[0], max_tokens=NEW_TOKENS)]
    assert [answer["tokens"] for answer in answers] == greedy_tokens(model, PROMPTS[:1], NEW_TOKENS) * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("are_stages", "prefill", "decode", "nodes", "within"),
    [
        ((RANKS, STAGES), 1, 2, {"decode-0": 2}, 1),
        ((STAGES, STAGES), 2, 4, {"prefill-0": 2, "decode-0": 2}, 1),
        ((STAGES, STAGES), 3, 2, {"prefill-0": 3}, 1),
        ((STAGES, STAGES), 2, 2, {"prefill-0": 2, "decode-0": 2}, 2),
    ],
    ids=["decode", "two stages a node", "three nodes", "two ranks a stage"],
)
async def test_stages_on_nodes_hand_over_to_each_other(
    are_stages: tuple[bool, bool], prefill: int, decode: int, nodes: dict[str, int], within: int, tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=5)
    await check(
        tmp_path,
        prefill=prefill,
        decode=decode,
        model=model,
        are_stages=are_stages,
        nodes=nodes,
        within=within,
        transport="ucx",
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_oss", "falcon_h1"])
async def test_windows_and_states_are_on_several_nodes(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    fields = {key: value for key, value in case.fields.items() if key != "layer_types"} | {"num_hidden_layers": 8}
    model = replace(case, fields=fields).build(tmp_path / "model")
    await check(
        tmp_path,
        prefill=2,
        decode=2,
        model=model,
        are_stages=(STAGES, STAGES),
        nodes={"prefill-0": 2, "decode-0": 2},
        transport="ucx",
        flags=["--block-size", "32"],
    )


@pytest.mark.long
async def test_a_first_stage_drafts_by_hidden_states_of_another_node(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=7)
    drafter("eagle3", model, tmp_path / "head")
    told = {"method": "eagle3", "model": str(tmp_path / "head"), "enable_adaptive_verification": False}
    await check(
        tmp_path,
        prefill=2,
        decode=2,
        model=model,
        are_stages=(STAGES, STAGES),
        nodes={"prefill-0": 2, "decode-0": 2},
        transport="ucx",
        speculative_config=json.dumps(told),
    )


class Point(NamedTuple):
    """A death: of which process, and what its worker's leader and its further node say and return."""

    dies: str
    said: str
    leader: int
    node: int


POINTS = [
    Point("stage", r"rank 1 \(pid {stage} on node 1\) ended with signal SIGKILL", LOST, LOST),
    Point("host", r"node 1 \(127\.0\.0\.1\) is lost: ", LOST, -signal.SIGKILL),
    Point("bridge", r"node 1 \(127\.0\.0\.1\) is lost: ", LOST, LOST),
    Point("own bridge", r"the bridge to other hosts \(pid {own bridge}\) ended with signal SIGKILL", LOST, LOST),
    Point("leader", "", -signal.SIGKILL, LOST),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("computes", [True, False], ids=["computing", "idle"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.dies)
async def test_a_worker_ends_with_a_node_and_its_requests_are_done_elsewhere(
    point: Point, computes: bool, tmp_path: Path
) -> None:
    model, name = build_tiny_model(tmp_path / "llama", "llama"), "decode-0"
    async with (
        WideCluster(
            tmp_path / "run", model=model, depths={name: 2}, nodes={name: 2}, decode=2, prefill=0, transport="ucx"
        ) as cluster,
        watching(cluster) as (bus, peers),
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        leader, node, decoding = cluster.processes[name], cluster.processes[f"{name}.1"], asyncio.Event()
        await until(peers, lambda states: len(states) == 2)
        await bus.subscribe(subjects.frames("gateway", name), frame_decoder, lambda _: decoding.set())
        (stage,), (bridge,), (own,) = (
            children_of(node.pid, "services.rank"),
            children_of(node.pid, "services.bridge"),
            children_of(leader.pid, "services.bridge"),
        )
        ends = {pid: os.pidfd_open(pid) for pid in (stage, bridge, own)}
        dies = {
            "stage": [stage], "host": [node.pid, bridge, stage], "bridge": [bridge], "own bridge": [own], "leader": [leader.pid],
        }[point.dies]  # fmt: skip
        asking = []
        if computes:
            asking = [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
            async with asyncio.timeout(BOUND_S):
                await decoding.wait()
        for pid in dies:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(BOUND_S):
            codes = await leader.wait(), await node.wait()
            for handle in ends.values():
                await ended(handle)
        asking = asking or [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
        answers = [await each for each in asking]
        await until(peers, lambda states: len(states) == 1 and all_idle(states))
        said = (cluster.folder / f"{name}.log").read_text()
    assert codes == (point.leader, point.node)
    assert re.search(point.said.format(stage=stage, **{"own bridge": own}), said), said
    assert [answer["tokens"] for answer in answers] == greedy_tokens(model, PROMPTS, NEW_TOKENS)


@pytest.mark.long
async def test_all_nodes_end_as_after_a_loss_when_one_of_them_is_lost(tmp_path: Path) -> None:
    """So whoever starts what failed starts all of them again."""
    model, name = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=3), "worker-0"
    async with _worker_of_both_roles(tmp_path, name, model, nodes=3) as cluster:
        (stage,) = children_of(cluster.processes[f"{name}.1"].pid, "services.rank")
        os.kill(stage, signal.SIGKILL)
        async with asyncio.timeout(BOUND_S):
            codes = [await cluster.processes[one].wait() for one in (name, f"{name}.1", f"{name}.2")]
        said = (cluster.folder / f"{name}.2.log").read_text()
    assert codes == [LOST, LOST, LOST]
    assert "node 0 (127.0.0.1) " in said


@pytest.mark.long
async def test_a_drained_worker_ends_on_all_nodes_and_starts_again(tmp_path: Path) -> None:
    """SIGTERM goes to all pods of a group at a time: the further node stays until the leader has drained."""
    model, name = build_tiny_model(tmp_path / "llama", "llama"), "worker-0"
    async with (
        _worker_of_both_roles(tmp_path, name, model) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        asking = [asyncio.create_task(complete(client, prompt, max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
        answers = [await each for each in asking]
        both = [cluster.processes[one] for one in (f"{name}.1", name)]
        for process in both:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            assert [await process.wait() for process in both] == [0, 0]
        await cluster.start(name)
        await cluster.until_ready()
        answers += [await complete(client, PROMPTS[0], max_tokens=NEW_TOKENS)]
    expected = greedy_tokens(model, PROMPTS, NEW_TOKENS)
    assert [answer["tokens"] for answer in answers] == [*expected, expected[0]]


def children_of(process: int, module: str) -> list[int]:
    """The processes of a module that this one started."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]
