"""The C kernels on an emulated Arm: they write what this processor writes, bit by bit, in every variant of both."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels import native
from engine.kernels.native import halves
from engine.kernels.quantised import tiles
from engine.kernels.quantised.tiles import Variant
from tests.unit.house.measures import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
PROGRAM = ROOT / "tests/unit/kernels/native_bits.c"
RUN_S = 240.0
# Old and new processors: the first one ends a program that multiplies by `sdot` with SIGILL.
ARMS = [("cortex-a53", Variant.NEON), ("neoverse-n1", Variant.NEON), ("neoverse-n1", Variant.NEON_DOTPROD)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program with this machine's library."""
    compiler, library = shutil.which("cc"), native.library()
    if compiler is None or library is None:
        pytest.skip("no C compiler, or no AVX2")
    return made(compiler, tmp_path_factory.mktemp("own") / "native_bits", library._name)


@pytest.fixture(scope="module")
def expected(own: Path) -> bytes:
    """The bytes that the program writes by this machine's plainest variant."""
    return written([str(own)], tiles.variants()[0], is_wide=False)


def made(compiler: str, program: Path, *kernels: str) -> Path:
    """Compile what calls the kernels, with them."""
    shared = [flag for flag in native.FLAGS if flag not in ("-shared", "-Wl,-z,defs")]
    command = [compiler, *shared, "-o", str(program), str(PROGRAM), *kernels, "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=RUN_S)
    return program


def written(command: list[str], variant: Variant, *, is_wide: bool, processor: str = "") -> bytes:
    """The bytes that the program writes by a variant."""
    environment = os.environ | ({"QEMU_CPU": processor} if processor else {})
    command = [*command, str(int(variant)), str(int(is_wide))]
    return subprocess.run(command, check=True, capture_output=True, env=environment, timeout=RUN_S).stdout


def test_every_variant_of_this_processor_writes_the_same(own: Path, expected: bytes) -> None:
    assert len(expected) > 6_000_000
    for variant in tiles.variants():
        for is_wide in {False, halves.is_wide()}:
            assert written([str(own)], variant, is_wide=is_wide) == expected, (variant, is_wide)


def test_an_arm_writes_what_this_processor_writes(expected: bytes, tmp_path: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("compares x86-64 with Arm")
    if shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"{COMPILER} or {EMULATOR} is not installed: `make arm` installs them")
    program = made(COMPILER, tmp_path / "native_bits", "-static", *map(str, native.FOLDER.glob("*.c")))
    for processor, variant in ARMS:
        assert written([EMULATOR, str(program)], variant, is_wide=False, processor=processor) == expected, processor
