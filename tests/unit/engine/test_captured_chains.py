"""Captured chains draft what the arithmetic does; see `captured_chains`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.needs import needs
from tests.unit.engine.launches import ROOT

pytestmark = pytest.mark.long  # the interpreter takes half a minute


@pytest.mark.parametrize("name", ["eagle3", "dflash+window"])
def test_a_captured_chain_drafts_what_the_arithmetic_does(name: str) -> None:
    needs("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.captured_chains"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, input=json.dumps([name]), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
