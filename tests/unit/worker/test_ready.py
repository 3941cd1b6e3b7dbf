"""The file that says whether a worker takes work."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.probe_file import forget, shown


def test_it_is_there_while_work_is_taken_and_gone_after_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "ready"
    seen = []

    def work() -> None:
        with shown(str(file)):
            seen.append(file.exists())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert seen == [True]
    assert not file.exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    forget(str(tmp_path / "ready"))
    forget(str(tmp_path / "ready"))
    assert not (tmp_path / "ready").exists()


def test_no_file_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with shown(""):
        assert list(tmp_path.iterdir()) == []
    forget("")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), shown(str(tmp_path / "nowhere" / "ready")):
        pass
