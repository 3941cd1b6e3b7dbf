"""What a test needs that may be missing: it is skipped on a developer's machine, and fails in CI.

For what `make test` installs. A tool that make doesn't install (helm, promtool, docker-compose, root) is a plain skip.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest


def needs(package: str) -> None:
    """Skip this test, or this module, where a Python package isn't installed; fail in CI. The package is not imported."""
    if find_spec(package) is None:
        missing(f"{package} is not installed: `make test` installs it")


def missing(reason: str) -> NoReturn:
    """Skip where a person runs the tests; fail where the environment says CI=true."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
