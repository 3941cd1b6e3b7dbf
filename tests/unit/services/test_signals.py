"""A process that is signalled ends what it does; signalled again it ends at once, and says nothing more."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from common.settings import ROOT

# It is slow to close what it opened, as a stack of servers is.
SLOW = """
import asyncio, contextlib
from services.runtime.signals import until_signalled

@contextlib.asynccontextmanager
async def opened():
    try:
        yield
    finally:
        print("closing", flush=True)
        await asyncio.sleep(3600)

async def run():
    async with until_signalled() as stopping, opened(), opened():
        print("ready", flush=True)
        await stopping.wait()

asyncio.run(run())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for said in ("ready", "closing"):
            assert process.stdout.readline().strip() == said
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "", "")
