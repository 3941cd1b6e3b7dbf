"""The folder of `baton up`."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.settings import ConfigError
from services.up.stack import _locked


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"--data-dir .*/file/data: Not a directory"),
        _locked(tmp_path / "file/data/lock"),
    ):
        pass


def test_a_folder_is_one_stack_s(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "data" / "lock"
    with _locked(lock), pytest.raises(ConfigError, match="another `baton up` uses it"), _locked(lock):
        pass
    with _locked(lock):
        pass
