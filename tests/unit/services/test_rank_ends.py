"""A further rank outlives a leader that was killed, and does not wait for one that ends it."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from common.settings import ROOT, ConfigError
from engine.config import CacheConfig, EngineConfig
from engine.fake.engine import FakeEngine
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from kvtransfer.liveness import create_locked
from kvtransfer.ranks.leader import RankedTransport
from kvtransfer.shm import PREFIX, ShmTransport
from kvtransfer.transport import Transport
from services.rank.process import Ends
from services.worker.ranks import Led, led
from services.worker.settings import WorkerServiceSettings
from worker.worker import EXIT_DEVICE_BROKEN


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    with closing(process.stdin), process:  # type: ignore[type-var]
        yield process
        process.kill()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, SharedMemoryGroup.num_bytes(2))
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def ends(leader: subprocess.Popen[bytes], memory: int) -> Iterator[Ends]:
    sockets = [*socket.socketpair(), *socket.socketpair()]
    ends = Ends(1, 2, sockets[0].detach(), sockets[2].detach(), os.dup(memory), leader.pid)
    yield ends
    ends.link.close()
    for each in (ends.channel, *sockets):
        each.close()


def test_it_waits_for_a_killed_leader_to_be_gone(leader: subprocess.Popen[bytes], ends: Ends) -> None:
    threading.Timer(0.1, leader.kill).start()
    ends.until_leader_is_gone()
    assert leader.poll() is not None


def test_a_leader_that_ends_it_is_not_waited_for(leader: subprocess.Popen[bytes], ends: Ends, memory: int) -> None:
    shared = mmap.mmap(memory, SharedMemoryGroup.num_bytes(2))
    SharedMemoryGroup(shared, rank=0, size=2).dismiss()
    ends.until_leader_is_gone()
    assert leader.poll() is None


def test_a_leader_that_is_gone_already_is_not_waited_for(leader: subprocess.Popen[bytes], ends: Ends) -> None:
    leader.kill()
    leader.wait()
    ends.until_leader_is_gone()
    assert ends.lost()


async def test_a_worker_that_fails_at_its_start_leaves_no_memory() -> None:
    made = list[Path]()

    async def fails() -> None:
        async with led(WorkerServiceSettings(), "w", asyncio.Event()) as lead:
            lead.transport.allocate((4, 16), torch.float32, "cpu")
            made.append(_file(lead.transport))
            assert made[0].exists()
            raise ConfigError("--worker-id w: another one has it")

    with pytest.raises(ConfigError):
        await fails()
    assert not made[0].exists()


class Ended:
    """Followers of which one ended."""

    refused = False

    def problem(self) -> str:
        return "rank 1 (pid 7) ended with signal SIGKILL"


async def test_a_rank_that_ends_as_it_is_asked_for_its_pool_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had loaded, so nobody looks at it until the worker runs. What it left goes, and what its worker has."""
    codes = list[int]()

    def ends(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr("services.worker.ranks.os._exit", ends)
    engine = FakeEngine(
        EngineConfig(model=Path(), cache=CacheConfig(num_blocks=4)), allocate=(own := ShmTransport()).allocate
    )
    left, lock = create_locked(PREFIX)
    os.close(lock)
    ours, its = socket.socketpair()
    its.close()
    lead = Led(Ranks(), RankedTransport(own, [ours]), Ended())  # type: ignore[arg-type]
    pool = _file(own)
    with pytest.raises(SystemExit):
        await lead.opened(engine, 7)
    assert codes == [EXIT_DEVICE_BROKEN]
    assert "rank 1 (pid 7) ended with signal SIGKILL" in capsys.readouterr().err
    assert not pool.exists()
    assert not left.exists()


def _file(transport: Transport) -> Path:
    assert isinstance(transport, ShmTransport)
    assert transport._path is not None
    return transport._path


def test_a_rank_that_still_imports_is_not_ended_with_its_leader() -> None:
    """Systemd tells every process of a service to end; the leader drains with its ranks."""
    command = [sys.executable, "-X", "importtime", "-m", "services.rank", "no words"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as rank:
        assert rank.stderr is not None
        assert any(line.split(b"|")[-1].strip() == b"torch._utils" for line in rank.stderr)
        rank.terminate()
        assert b"msgspec.DecodeError" in rank.stderr.read()
    assert rank.returncode == 1
