"""Transports are chosen by name."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common.messages import KVLayout, Region
from kvtransfer.cuda.ipc import FORGOTTEN_S, GONE_AFTER_S, PREFIX, CudaIpcTransport
from kvtransfer.liveness import create_locked, host
from kvtransfer.transport import TransferError, open_transport
from kvtransfer.transports import TRANSPORTS, TransportName, automatic, reaches_others
from tests.needs import needs


def test_an_unknown_transport_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="shm, cuda_ipc, ucx, local"):
        open_transport("pigeon")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_transport_of_the_list_opens_under_its_name(name: TransportName) -> None:
    if name == "ucx":
        needs("ucxx")

    assert open_transport(name).name == name


@pytest.mark.parametrize(("device", "name"), [("cpu", "shm"), ("cuda", "cuda_ipc"), ("cuda:3", "cuda_ipc")])
def test_the_automatic_transport_moves_the_devices_memory(device: str, name: str) -> None:
    assert automatic(device) == name


def test_only_workers_with_the_local_transport_hand_nothing_over() -> None:
    assert [name for name in TRANSPORTS if not reaches_others(name)] == ["local"]
    assert reaches_others("one-sided")  # a simulated one


def test_knowing_the_transports_loads_no_torch() -> None:
    """`baton up` reads its settings without it."""
    check = "import sys, kvtransfer.transports; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


async def test_a_local_pool_is_zeroed_memory_that_no_peer_can_reach() -> None:
    transport = open_transport("local")
    pool = transport.allocate((2, 3), torch.float32, "cpu")
    assert torch.equal(pool, torch.zeros(2, 3))
    layout = KVLayout(num_blocks=2, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    region = await transport.open(pool, layout, incarnation=7)
    with pytest.raises(TransferError, match="another one"):
        await transport.connect(region)


async def test_gpu_memory_is_what_cuda_ipc_moves() -> None:
    with pytest.raises(ValueError, match="use --transport shm"):
        open_transport("cuda_ipc").allocate((2, 3), torch.float32, "cpu")


@pytest.mark.parametrize("wrong", [{"host": "another"}, {"file": "../etc/passwd"}, {"file": "baton-ipc-gone"}])
async def test_a_peer_that_cuda_ipc_can_t_reach_is_refused_with_the_reason(wrong: dict[str, str]) -> None:
    transport = CudaIpcTransport()
    layout = KVLayout(num_blocks=2, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    transport._pool, transport._layout = torch.zeros(1), layout
    path, lock = create_locked(PREFIX)
    try:
        address = {"host": host(), "file": path.name} | wrong
        with pytest.raises(TransferError, match=r"another host|the peer is gone"):
            await transport.connect(Region(transport="cuda_ipc", incarnation=1, layout=layout, address=address))
    finally:
        path.unlink()
        os.close(lock)


async def test_a_writer_is_gone_a_moment_after_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may outlive the lock by as long as the driver takes to end them."""
    now = 100.0
    monkeypatch.setattr("kvtransfer.cuda.ipc.time", SimpleNamespace(monotonic=lambda: now))
    transport = CudaIpcTransport()
    layout = KVLayout(num_blocks=2, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    path, lock = create_locked(PREFIX)
    writer = Region(transport="cuda_ipc", incarnation=1, layout=layout, address={"file": path.name})
    assert not transport.writer_gone(None)
    assert not transport.writer_gone(writer)
    os.close(lock)
    path.unlink()
    assert not transport.writer_gone(writer)
    now += GONE_AFTER_S
    assert transport.writer_gone(writer)
    for number in range(100):  # each restart of a peer has a name of its own
        now += GONE_AFTER_S
        transport.writer_gone(
            Region(transport="cuda_ipc", incarnation=1, layout=layout, address={"file": f"{path.name}{number}"})
        )
    assert len(transport._gone_since) <= FORGOTTEN_S
    assert not transport.writer_gone(writer)
    now += GONE_AFTER_S
    assert transport.writer_gone(writer)
