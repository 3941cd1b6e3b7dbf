"""The C kernels are compiled once, kept, and done without where there is no compiler."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.kernels import native
from engine.kernels.native import floats
from tests.unit.house.measures import ROOT

pytestmark = pytest.mark.skipif(not native.is_suitable(), reason="no AVX2")


@pytest.fixture(scope="module")
def real() -> str:
    """This machine's library."""
    if (library := native.library()) is None:
        pytest.skip("no C compiler")
    return library._name


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path without programs; returns an empty folder."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_instructions_that_are_asked_for_are_those_that_sources_name() -> None:
    named = dict[str, frozenset[str]]()
    for source in ("vectors.h", "wide.h"):
        text = (native.FOLDER / source).read_text(encoding="utf-8").partition("#else")[0]  # an Arm's are there
        for name, before, found in re.findall(r'#define (NARROW|WIDER) (\w+ )?"([\w,]+)"', text):
            named[name] = frozenset(filter(None, found.split(","))) | named.get(before.strip(), frozenset())
    assert named == {"NARROW": native.NARROW, "WIDER": floats.WIDER}


@pytest.mark.parametrize("missing", sorted(floats.WIDER))
def test_a_processor_without_one_of_the_instructions_does_without_the_kernels(
    missing: str, real: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floats, "has_avx512", lambda: True)
    monkeypatch.setattr(native, "features", lambda: floats.WIDER)
    assert floats.is_usable.__wrapped__()
    monkeypatch.setattr(native, "features", lambda: floats.WIDER - {missing})
    assert not floats.is_usable.__wrapped__()


@pytest.mark.parametrize(
    ("machine", "capability", "features", "limit", "expected"),
    [
        ("x86_64", "AVX2", native.NARROW, "", True),
        ("x86_64", "AVX2", native.NARROW - {"f16c"}, "", False),
        ("x86_64", "DEFAULT", native.NARROW, "", False),
        ("x86_64", "AVX2", native.NARROW, "default", False),
        ("aarch64", "DEFAULT", native.NEON, "", True),
        ("aarch64", "SVE256", native.NEON, "", True),
        ("aarch64", "DEFAULT", native.NEON, "default", False),
        ("aarch64", "DEFAULT", frozenset(), "", False),
        ("riscv64", "DEFAULT", native.NEON, "", False),
    ],
)
def test_a_processor_suits_by_its_instructions(
    machine: str, capability: str, features: frozenset[str], limit: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr(native, "features", lambda: features)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    assert native.is_suitable() is expected


def test_an_arm_s_instructions_are_those_that_its_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def getauxval(self, kind: ctypes.c_ulong) -> int:
            assert kind.value == native.AT_HWCAP
            return 1 << 20 | 1 << 1 | 1 << 22

    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("ctypes.CDLL", lambda name: Kernel())
    assert native.features.__wrapped__() == {"asimd", "asimddp"}


def test_without_a_compiler_it_says_so_and_what_to_install(alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "baton.engine"):
        assert native.library.__wrapped__() is None
    (line,) = (vars(record) for record in caplog.records if record.message == "engine.not_compiled")
    assert "no C compiler" in line["error"]
    assert "gcc" in line["remedy"]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(alone: Path) -> None:
    compiler = alone / "bin" / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such target' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(native.NotCompiledError, match="no such target"):
        native.compiled(alone / "kernels")
    assert not list((alone / "kernels").iterdir())


@pytest.fixture
def copying(real: str, alone: Path) -> Path:
    """The same with a compiler that takes a library that is there."""
    program(alone, f'{shutil.which("cp", path=os.defpath)} {real} "$2"')
    return alone


def program(alone: Path, does: str) -> Path:
    """A compiler that does this with its `-o "$2"`, and notes each call in `calls`."""
    compiler = alone / "bin" / "cc"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho call >> {alone}/calls\n{does}\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return compiler


def others_may_write(alone: Path) -> None:
    (alone / "cache" / "baton" / "kernels").mkdir(parents=True)
    (alone / "cache" / "baton" / "kernels").chmod(0o777)


def no_folder(alone: Path) -> None:
    (alone / "cache").write_text("")


def of_another_machine(alone: Path) -> None:
    native.compiled(native.cache()).write_text("no library")


@pytest.mark.parametrize("spoil", [others_may_write, no_folder, of_another_machine])
def test_a_cache_that_cannot_be_used_is_done_without(copying: Path, spoil: Callable[[Path], None]) -> None:
    spoil(copying)
    before = sorted(copying.rglob("*"))
    assert native.loaded().baton_tiles_product
    assert set(copying.rglob("*")) - {*before} <= {copying / "calls"}


def test_a_user_without_a_home_has_kernels_too(copying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert native.loaded().baton_tiles_product


def test_processes_that_start_together_compile_once(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone / "source").mkdir()
    (alone / "source" / "some.c").write_text("")
    monkeypatch.setattr(native, "FOLDER", alone / "source")
    os.mkfifo(alone / "go")
    program(alone, f'[ "$3" != -c ] || read -r line < {alone}/go\necho made > "$2"')
    waiting, lock = threading.Semaphore(0), fcntl.flock

    def flock(handle: int, how: int) -> None:
        waiting.release()
        lock(handle, how)

    monkeypatch.setattr(native.fcntl, "flock", flock)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(native.compiled, alone / "kernels") for _ in range(2)]
        assert all(waiting.acquire(timeout=60) for _ in range(2))
        with (alone / "go").open("w") as gate:
            gate.write("go\ngo\n")
            gate.flush()
            assert made[0].result(60) == made[1].result(60)
    assert (alone / "calls").read_text() == "call\n" * 2  # the source and the library


@pytest.mark.parametrize(("dtype", "calls"), [("float32", True), ("bfloat16", False)])
def test_an_engine_has_them_before_its_first_request(dtype: str, calls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[None]()
    monkeypatch.setattr(native, "library", lambda: asked.append(None))
    cache = CacheConfig(num_blocks=4)
    Engine(EngineConfig(model=ROOT / "demo", dtype=dtype, cache=cache, max_sequences=1, max_batch_tokens=16))
    assert bool(asked) == calls


def test_an_image_s_source_may_belong_to_a_group(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = alone / "source"
    source.mkdir()
    source.chmod(0o775)
    (source / "some.c").write_text("")
    monkeypatch.setattr(native, "FOLDER", source)
    program(alone, 'echo made > "$2"')
    made = native.compiled(source)
    assert made.parent == source
    others_may_write(alone)
    assert native.compiled(native.cache()) == made
    made.unlink()
    with pytest.raises(OSError, match="others may write there"):
        native.compiled(native.cache())


def test_what_was_compiled_is_kept(alone: Path) -> None:
    compiler = program(alone, 'echo made > "$2"')
    made = native.compiled(alone / "kernels")
    assert made.read_text() == "made\n"
    compiler.unlink()
    assert native.compiled(alone / "kernels") == made
    assert list((alone / "kernels").iterdir()) == [made]
