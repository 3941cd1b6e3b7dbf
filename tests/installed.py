"""Baton as a package: its wheel, and `baton up` of an installation, asked one question."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx

from tests.ports import own_port

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 90.0
QUESTION, IN_THE_ANSWER = "What is the capital of France?", "Paris"


def build_wheel(folder: Path) -> Path:
    """Build this checkout's wheel into `folder`, with the builder of this environment."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True)
    (made,) = folder.glob("baton_serve-*.whl")
    return made


def without_ours() -> dict[str, str]:
    """This process's environment without what would lead Baton or Python elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "OPENAI_", "PYTHON"))}


@contextlib.asynccontextmanager
async def serving(baton: Sequence[str], here: Path, environment: Mapping[str, str]) -> AsyncIterator[str]:
    """Run `baton up` in the folder `here`; its address. It must end with 0 after SIGINT. Raises TimeoutError, AssertionError."""
    port = own_port()
    up = await asyncio.create_subprocess_exec(
        *(*baton, "up", "--port", str(port), "--drain-s", "5"),
        cwd=here,
        env=dict(environment),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        assert up.stdout is not None
        said = ""
        async with asyncio.timeout(PATIENCE_S):
            while "Baton serves demo" not in said:
                line = await up.stdout.readline()
                assert line, said
                said += line.decode()
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            up.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.wait(), PATIENCE_S) == 0


async def answer(url: str) -> str:
    """The demo model's answer to the question."""
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        told = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    return str(told["choices"][0]["message"]["content"])
