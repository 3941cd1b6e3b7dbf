"""A process that hangs when it was told to stop ends all the same, and says where it hung."""

from __future__ import annotations

import subprocess
import sys

import pytest

HANGS = """
import asyncio, logging, time
from services.runtime.signals import ending_in_time

async def waits_for_ever():
    await asyncio.Event().wait()

async def main():
    logging.basicConfig(format="%(message)s %(stack)s")
    stopping = asyncio.Event()
    async with ending_in_time(stopping, 0.0, leave_s=1.0):
        stopping.set()
        {hang}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("hang", "told"),
    [("await waits_for_ever()", "process.still_here main"), ("await asyncio.sleep(0); time.sleep(60)", "in main")],
)
def test_what_hangs_is_told_and_ended(hang: str, told: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS.format(hang=hang)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert told in ended.stderr, ended.stderr
    assert "most recent call first" in ended.stderr
