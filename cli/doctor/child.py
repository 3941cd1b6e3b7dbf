"""Checks in a child process: torch stays out of the parent, and hanging drivers show."""

from __future__ import annotations

import asyncio
import json
import sys

from common.settings import ROOT
from services.runtime.checks.finding import Finding

CHILD_S = 120.0  # torch and CUDA start slowly


async def asked(module: str, *words: str) -> list[Finding]:
    """Findings of a child process, a module of this folder: torch stays out of this process, and hanging drivers show."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"cli.doctor.{module}", *words),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), CHILD_S)
        return [Finding(**finding) for finding in json.loads(output)]
    except (TimeoutError, ValueError) as error:
        if child.returncode is None:
            child.kill()
            await child.wait()
        remedy = f"run `python -m cli.doctor.{' '.join((module, *words))}` and read its error; see dmesg"
        return [Finding("torch", "fail", f"the check by torch gave no answer ({type(error).__name__})", remedy)]
