"""A `baton up` of a test's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

from tests.ports import own_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 150.0


class Up:
    """A running `baton up` and what it said."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.said: list[str] = []

    async def says(self, part: str) -> str:
        """Return the next line with `part` in it. Fails with everything said when the output ends first."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self.process.stdout.readline()).decode():
                self.said.append(line)
                if part in line:
                    return line
        raise AssertionError(f"never said {part!r}:\n{''.join(self.said)}")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def children(self, part: str) -> list[psutil.Process]:
        """The children whose command lines have `part` in them."""
        return [child for child in self.family() if part in _command(child)]

    def child(self, part: str) -> psutil.Process:
        """The first of them."""
        return self.children(part)[0]

    async def ends(self) -> tuple[int, list[str]]:
        """Wait for the end; return the exit code and the rest of what was said."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            rest = (await self.process.stdout.read()).decode().splitlines()
            return await self.process.wait(), rest


@contextlib.asynccontextmanager
async def up(model: Path | None, data: Path, *options: str, **variables: str) -> AsyncIterator[Up]:
    """One that serves the model, or those of `options`; without settings of this environment but `variables`.

    Killed at the end if it still runs.
    """
    port, served = own_port(), () if model is None or "--model" in options else ("--model", str(model))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.up", *served, "--port", str(port), "--data-dir", str(data)),
        *("--kv-memory-mb", "8", "--drain-s", "5", *options),
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Up(process, f"http://127.0.0.1:{port}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _command(process: psutil.Process) -> str:
    """A process's command line; "" for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


Start = Callable[..., contextlib.AbstractAsyncContextManager[Up]]  # `up` with a model and a data folder
