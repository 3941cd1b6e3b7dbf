"""A processor that announces tiles of AMX which nothing can use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from engine.processor import BOUND, WITHOUT_TILES, has_avx512, settle
from tests.unit.house.measures import ROOT


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(BOUND, "")  # so that what a test sets is taken back
    monkeypatch.delenv(BOUND)
    return monkeypatch


def is_illegal() -> None:
    signal.raise_signal(signal.SIGILL)


def fails() -> None:
    raise ArithmeticError


def test_tiles_that_end_a_child_are_not_used(unbound: pytest.MonkeyPatch) -> None:
    assert settle(has_tiles=lambda: True, trial=is_illegal) == WITHOUT_TILES == os.environ[BOUND]


@pytest.mark.parametrize("trial", [int, fails])
def test_tiles_that_work_or_fail_otherwise_are_kept(unbound: pytest.MonkeyPatch, trial: Callable[[], object]) -> None:
    assert settle(has_tiles=lambda: True, trial=trial) == ""
    assert BOUND not in os.environ


def test_without_tiles_nothing_is_tried(unbound: pytest.MonkeyPatch) -> None:
    assert settle(has_tiles=lambda: False, trial=is_illegal) == ""


def test_a_bound_of_the_users_own_stays(unbound: pytest.MonkeyPatch) -> None:
    unbound.setenv(BOUND, "AVX2")
    assert settle(has_tiles=lambda: True, trial=is_illegal) == "AVX2"


def test_a_settled_process_multiplies_in_bfloat16() -> None:
    code = (
        "import torch; from engine.processor import settle; settle()\n"
        "x = torch.ones(512, 512, dtype=torch.bfloat16); assert torch.nn.functional.linear(x, x)[0, 0] == 512"
    )
    environment = {name: value for name, value in os.environ.items() if name != BOUND}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False).returncode == 0


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "SVE256"])
def test_torch_s_own_limit_is_heeded(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert not has_avx512()


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("limit", [{BOUND: "AVX2"}, {"ATEN_CPU_CAPABILITY": "avx2"}])
def test_what_a_limit_forbids_is_not_used(limit: dict[str, str]) -> None:
    """oneDNN without VNNI adds up products of bytes in 16 bits: too few."""
    code = (
        "import torch; torch.cpu._is_amx_tile_supported = torch.cpu._is_vnni_supported = lambda: True\n"
        "from engine.kernels.linear import computes_in_bfloat16\n"
        "from engine.kernels.quantised.int8 import multiplies_bytes\n"
        "print(computes_in_bfloat16(), multiplies_bytes())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PATH": "", **limit}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False False"
