"""The C kernels are compiled once, kept, and done without where there is no compiler."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from engine.kernels import native

pytestmark = pytest.mark.skipif(not native.is_suitable(), reason="no AVX2")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path without programs; returns an empty folder."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


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


def test_what_was_compiled_is_kept(alone: Path) -> None:
    compiler = alone / "bin" / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    made = native.compiled(alone / "kernels")
    assert made.read_text() == "made\n"
    compiler.unlink()
    assert native.compiled(alone / "kernels") == made
    assert list((alone / "kernels").iterdir()) == [made]
