"""A dependency that `make test` installs is never missed in silence by CI."""

from __future__ import annotations

import pytest

from tests.needs import needs


@pytest.mark.parametrize("ci", ["", "false"])
def test_a_person_s_run_skips_what_needs_a_missing_package(ci: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match="no_such_package is not installed: `make test` installs it"):
        needs("no_such_package")


def test_ci_fails_what_needs_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no_such_package is not installed: `make test` installs it"):
        needs("no_such_package")


def test_a_package_that_is_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    needs("pytest")
