"""Stages on several hosts: what is refused before anything starts, and what a node is told that can't join."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.settings import ConfigError
from engine.config import DraftConfig, EngineConfig
from engine.parallel import layout
from engine.parallel.nodes import bridge
from engine.parallel.nodes.bridged import EVERYBODY, Bridged
from engine.parallel.nodes.joining import Joined, Meeting, Places
from engine.parallel.nodes.mirror import Mirror
from engine.parallel.nodes.wire import receive_message
from services.rank.process import on_this_host
from services.runtime.loading import load_settings
from services.worker.further import serve_node
from services.worker.nodes import Nodes
from services.worker.process import see_only
from services.worker.ranks import BRIDGE, asked_of, check_ranks, facts_of, led, secret_of
from services.worker.settings import WorkerServiceSettings
from tests.models import build_tiny_model
from tests.ports import own_port
from tests.unit.engine.nodes.hosts import connected

PATIENCE_S = 60.0


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("decode-0:made-up")
    return file


def settings_of(model: Path, secret: Path, *more: str) -> WorkerServiceSettings:
    words = ["--model", str(model), "-pp", "2", "--nats-credentials", str(secret), "--transport", "ucx", *more]
    return load_settings(WorkerServiceSettings, command="decode", arguments=words, environment={})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("2:0@10.0.0.1", Nodes(2, 0, "10.0.0.1", 29501)),
        ("3:2@leader.example:4000", Nodes(3, 2, "leader.example", 4000)),
        ("2:1@[fd00::1]:99", Nodes(2, 1, "fd00::1", 99)),
    ],
)
def test_nodes_are_read(text: str, found: Nodes | None) -> None:
    assert Nodes.parse(text) == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2", "written as N:RANK@HOST or N:RANK@HOST:PORT, such as 2:0@10.0.0.1"),
        ("2:0@a:b", "such as 2:0@10.0.0.1"),
        ("1:0@a", "2 to 64 nodes"),
        ("2:2@a", "nodes are numbered from 0 to 1"),
        ("2:0@a:70000", "a port from 1 to 65535"),
    ],
)
def test_other_words_for_nodes_are_refused(text: str, told: str, secret: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--nnodes \(BATON_NNODES\): ") as raised:
        settings_of(Path("demo"), secret, "--nnodes", text)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["-pp", "3"], "--pipeline-parallel-size 3: each node has as many stages: take a multiple of 2"),
        (["-pp", "1"], "--pipeline-parallel-size 1: each node has as many stages: take a multiple of 2"),
        (["--nats-credentials", ""], "give the same --nats-credentials FILE on all nodes"),
        (["--transport", "shm"], "--transport shm reaches the workers of one host alone: take ucx:HOST"),
        (["--transport", "auto"], "--transport shm reaches the workers of one host alone: take ucx:HOST"),
        (["--nnodes", "2:0@10.0.0.1"], "--transport ucx: workers on other hosts can't reach 127.0.0.1: take ucx:HOST"),
        (["--kv-host-mb", "8", "--kv-disk", "/tmp/x:8"], "give no --kv-disk"),
    ],
)
def test_what_nodes_do_not_have_is_refused_with_a_remedy(more: list[str], told: str, secret: Path) -> None:
    settings = settings_of(Path("demo"), secret, "--nnodes", "2:0@127.0.0.1", *more)
    with pytest.raises(ConfigError) as raised:
        settings.check_ranks()
    assert str(raised.value).startswith(f"--nnodes {settings.nnodes}: ")
    assert told in str(raised.value)


def test_each_node_has_its_share_of_processes_cores_and_gpus(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.settings.physical_cores", lambda: 16)
    settings = settings_of(Path("demo"), secret, "-pp", "4", "-tp", "2", "--nnodes", "2:1@127.0.0.1").sized()
    assert (settings.processes, settings.processes_here, settings.threads) == (8, 4, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    gpus = settings.model_copy(update={"device": "cuda", "tensor_parallel_size": 1, "pipeline_parallel_size": 8})
    assert see_only(gpus).device == "cuda:0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


@pytest.fixture
def node(tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Serve as node 1 with these settings, of a model that node 0 has too, and no process of its own."""
    monkeypatch.setattr("services.worker.further._signalled", threading.Event)
    port = own_port()
    model = build_tiny_model(tmp_path / "llama", "llama")

    def serve(credentials: str = "", *more: str) -> int:
        ours = settings_of(model, secret, "--nnodes", f"2:0@127.0.0.1:{port}", "--dtype", "float32").sized()
        check_ranks(ours)
        meeting = Meeting("127.0.0.1", port, secret_of(ours), Places(2, 2), facts_of(ours))
        over = threading.Event()
        waiting = threading.Thread(target=meeting.wait, args=(over.is_set,))
        waiting.start()
        theirs = secret
        if credentials:
            theirs = tmp_path / "other"
            theirs.write_text(credentials)
        its = settings_of(model, theirs, "--nnodes", f"2:1@127.0.0.1:{port}", "--dtype", "float32", *more).sized()
        try:
            return serve_node(its, Nodes(2, 1, "127.0.0.1", port))
        finally:
            over.set()
            waiting.join()

    return serve


def test_a_node_with_another_secret_is_told_which_file(node: Callable[..., int]) -> None:
    with pytest.raises(ConfigError, match=r"another secret.*: give the same --nats-credentials on all nodes"):
        node("decode-0:guessed")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--dtype", "bfloat16"], "--dtype: float32 on node 0, bfloat16 here"),
        (["-pp", "2", "-tp", "2"], "--tensor-parallel-size: 1 on node 0, 2 here"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype: auto on node 0, int8 here"),
        (["--speculative-config", "mtp"], "--speculative-config: none on node 0, "),
    ],
)
def test_a_node_with_other_settings_is_told_which(more: list[str], told: str, node: Callable[..., int]) -> None:
    with pytest.raises(ConfigError) as raised:
        node("", *more)
    assert "node 0 at 127.0.0.1:" in str(raised.value)
    assert told in str(raised.value)


def test_a_node_with_another_model_is_told(node: Callable[..., int], tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", "llama", seed=7)
    with pytest.raises(ConfigError, match=r"--model: [0-9a-f]{32} on node 0, [0-9a-f]{32} here"):
        node("", "--model", str(other))


def test_a_node_has_model_and_drafter_in_folders_of_its_own(secret: Path, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    told = {"method": "draft_model", "model": str(model)}
    for config, folders in ((json.dumps(told), (model, model)), ("mtp", (model, model)), ("suffix", (model, None))):
        settings = settings_of(model, secret, "--nnodes", "2:1@10.0.0.1", "--speculative-config", config)
        asked = asked_of(settings, "node 1", first=1)
        assert (asked.model, asked.drafter) == tuple("" if folder is None else str(folder) for folder in folders)
        here = asked_of(settings, "decode-0")
        assert (here.model, here.drafter, here.first) == ("", "", 0)
        elsewhere = DraftConfig(folder=Path("/there/draft"), num_drafts=3) if folders[1] else None
        leaders = EngineConfig(model=Path("/there"), draft=elsewhere)
        own = on_this_host(leaders, asked)
        assert (own.model, own.draft and own.draft.folder, own.draft and own.draft.num_drafts) == (
            *folders,
            elsewhere and 3,
        )
        assert on_this_host(leaders, here) == leaders


async def test_a_leader_says_that_it_cannot_listen_and_leaves_while_it_waits(secret: Path, tmp_path: Path) -> None:
    model, stopping = build_tiny_model(tmp_path / "llama", "llama"), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = settings_of(model, secret, "--nnodes", f"2:0@127.0.0.1:{taken.getsockname()[1]}").sized()
        with pytest.raises(ConfigError, match=r"node 0 can't listen at 127\.0\.0\.1:.*give an address of this machine"):
            async with led(settings, "w", stopping):
                raise AssertionError("nobody joined")
    settings = settings.model_copy(update={"nnodes": f"2:0@127.0.0.1:{own_port()}"})
    stopping.set()
    with pytest.raises(SystemExit) as left:
        async with led(settings, "w", stopping):
            raise AssertionError("nobody joined")
    assert left.value.code == 0


# -- the bridge as a process ---------------------------------------------------------------------------------------


@pytest.fixture
def bridges() -> Iterator[tuple[Bridged, Bridged]]:
    """Those of two nodes of a process each."""
    ends, places = connected(), Places(2, 2)
    memories = [os.memfd_create("ranks") for _ in range(2)]
    for memory in memories:
        os.ftruncate(memory, layout.num_bytes(2))
    found = [
        Bridged(BRIDGE, memory, places, [Joined(1 - node, "10.0.0.9", "", end)], node=node)
        for node, (memory, end) in enumerate(zip(memories, ends, strict=True))
    ]
    yield found[0], found[1]
    for each in found:
        each.close()
    for memory in memories:
        os.close(memory)


def until_said(bridged: Bridged, rank: int = EVERYBODY) -> str:
    never = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if (words := bridged.said_of(rank)) is not None:
            return words
        never.wait(0.01)
    raise AssertionError("nothing was said")


def test_a_bridge_that_is_killed_is_named_on_both_hosts(bridges: tuple[Bridged, Bridged]) -> None:
    first, second = bridges
    os.kill(second._process.pid, signal.SIGKILL)
    assert until_said(first).startswith("node 1 (10.0.0.9) is lost: ")
    assert until_said(second) == f"the bridge to other hosts (pid {second._process.pid}) ended with signal SIGKILL"


def test_last_words_come_over_two_bridges_before_their_host_is_lost(bridges: tuple[Bridged, Bridged]) -> None:
    first, second = bridges
    second.say(1, "rank 1 (pid 7 on node 1) ended with signal SIGKILL")
    second.close()
    assert until_said(first, 1) == "rank 1 (pid 7 on node 1) ended with signal SIGKILL"
    assert until_said(first).startswith("node 1 (10.0.0.9) is lost: ")


def test_a_bridge_ends_with_its_parent() -> None:
    code = """
import os, sys
from engine.parallel import layout
from engine.parallel.nodes.bridged import Bridged
from engine.parallel.nodes.joining import Places
from services.worker.ranks import BRIDGE
memory = os.memfd_create("ranks")
os.ftruncate(memory, layout.num_bytes(2))
print(Bridged(BRIDGE, memory, Places(2, 2), [])._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    pid = int(done.stdout)
    never = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        never.wait(0.01)
    raise AssertionError("it lives on")


def test_a_host_that_stands_still_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says one thing, and then nothing."""
    monkeypatch.setattr(bridge, "STANDS_S", 1.0)
    ends, parents = connected(), socket.socketpair()
    memory = mmap.mmap(-1, layout.num_bytes(2))
    side = bridge.Side("node 1 (10.0.0.9)", ends[0], Mirror(memory, 2, theirs=[1]))
    running = threading.Thread(target=bridge.run, args=([side], parents[0]), daemon=True)
    ends[1].sendall(Mirror(memory, 2, theirs=[0]).beats().head + bytes(8))
    running.start()
    assert b"node 1 (10.0.0.9) is lost: no sign of life for" in receive_message(parents[1])
    parents[1].close()
    running.join(PATIENCE_S)
    assert not running.is_alive()
