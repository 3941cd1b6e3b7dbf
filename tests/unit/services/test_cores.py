"""Which cores a process may use, and how `up` shares them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.rank.cores import listed, own_processors, physical_cores
from services.up.settings import DEMO, UpSettings


def machine(root: Path, cores: list[str], quota: str = "") -> Path:
    """A machine with the logical processors of each core."""
    for siblings in cores:
        for number in siblings.split(","):
            folder = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
            folder.mkdir(parents=True)
            (folder / "core_cpus_list").write_text(f"{siblings}\n")
    if quota:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")
    return root


@pytest.mark.parametrize(
    ("quota", "allowed", "count"),
    [
        ("", range(8), 4),
        ("", [0, 4], 1),  # two threads of one core
        ("", [0, 1, 5], 2),
        ("max 100000", range(8), 4),
        ("250000 100000", range(8), 3),
        ("20000 100000", range(8), 1),
        ("", [90], 1),  # not described
    ],
)
def test_a_core_counts_once_and_a_quota_bounds_it(tmp_path: Path, quota: str, allowed: list[int], count: int) -> None:
    assert physical_cores(machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"], quota), allowed) == count


def test_this_machine_has_cores() -> None:
    assert physical_cores() >= 1


@pytest.mark.parametrize(
    ("given", "prefill"),
    [
        ({}, 1),  # the demo shows a handoff
        ({"model": "/"}, 0),  # weights in memory once
        ({"model": "/", "prefill": 1}, 1),
        ({"prefill": 0}, 0),
        ({"model": "/", "device": "cuda"}, 1),
    ],
)
def test_a_machine_without_a_gpu_has_the_weights_once(given: dict[str, object], prefill: int) -> None:
    assert UpSettings.model_validate(given).shared_out().prefills.least == prefill


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.up.settings.physical_cores", lambda: 9)
    assert DEMO.is_dir()
    for given, threads in (({}, 4), ({"decode": 3, "prefill": 1}, 2), ({"threads": 7}, 7), ({"decode": 20}, 1)):
        assert UpSettings.model_validate(given).shared_out().threads == threads


def nodes_of(root: Path, nodes: list[str]) -> Path:
    """A machine with the logical processors of each memory node."""
    for number, processors in enumerate(nodes):
        folder = root / "sys/devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "allowed", "size", "near"),
    [
        (["0-3,8-11", "4-7,12-15"], range(16), 2, ["0-3,8-11", "4-7,12-15"]),
        (["0-3", "4-7"], range(8), 4, ["0-3", "0-3", "4-7", "4-7"]),  # which of its cores is the kernel's choice
        (["0", "1", "2", "3"], range(4), 2, ["0-1", "2-3"]),
        (["0-3", "4-7"], range(8), 1, [""]),
        (["0-3"], range(4), 2, ["", ""]),
        (["0-1", "2-3", "4-5"], range(6), 2, ["", ""]),  # they don't divide
        (["0-3", "4-7"], range(4), 2, ["", ""]),  # a container on one
        (["0-3", "", "4-7"], [2, 3, 5], 2, ["2-3", "5"]),  # a node of memory alone
        ([], range(4), 2, ["", ""]),  # not described
    ],
)
def test_ranks_stay_on_memory_nodes_of_their_own(
    tmp_path: Path, nodes: list[str], allowed: list[int], size: int, near: list[str]
) -> None:
    machine = nodes_of(tmp_path, nodes)
    assert [listed(own_processors(rank, size, machine, allowed)) for rank in range(size)] == near


def test_twelve_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    machine = nodes_of(tmp_path, [str(number) for number in range(12)])
    assert listed(own_processors(5, 6, machine, range(12))) == "10-11"
