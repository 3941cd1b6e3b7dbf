"""The models whose files are on a gateway's machine: listed, fetched by a child process, removed."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator
from typing import Any

from common.errors import InvalidRequestError, OverloadedError, UnavailableError
from common.settings import ConfigError
from gateway.http.problem import ConflictError, ModelNotFoundError, NotKeptError
from services.runtime.commands import service_environment
from services.runtime.hub import NAMED, is_kept, kept, parsed
from services.runtime.linux import die_with_parent
from services.runtime.models.kept import kept_models, named_one, removed
from services.runtime.models.serving import is_served
from services.runtime.servers import stop

MAX_FETCHES = 2
STOP_S = 5.0
MAX_LINE = 64 << 10
_STORE = "over HTTP models are fetched of the hub alone; `baton pull` on this machine asks other stores"
_FORM = "is no name of a model that can be fetched: write org/name[@revision][:file-or-quant], or {}"


class KeptFiles:
    """Implements `gateway.answers.changes.ModelFiles` over Hugging Face's cache."""

    def __init__(self) -> None:
        self._fetches = 0

    async def kept(self) -> list[dict[str, Any]]:
        try:
            return await asyncio.to_thread(_kept)
        except OSError as error:
            raise UnavailableError(f"the models' files can't be read: {error.strerror}") from None

    async def fetch(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        named = parsed(name)
        if named is not None and named.store:
            raise InvalidRequestError(f"{name[:128]!r}: {_STORE}", param="model")
        if name not in NAMED and named is None:
            raise InvalidRequestError(f"{name[:128]!r} {_FORM.format(', '.join(NAMED))}", param="model")
        if self._fetches >= MAX_FETCHES:
            raise OverloadedError(f"{MAX_FETCHES} models are being fetched: try again when one of them is there")
        self._fetches += 1
        process = None
        try:
            process = await _fetcher(name)
            async for step in _steps(process, name):
                yield step
        finally:
            self._fetches -= 1
            if process is not None:
                await stop(process, timeout_s=STOP_S)

    async def remove(self, name: str) -> int:
        if name in NAMED:
            raise ConflictError(f"{name!r} comes in a package: `baton rm {name}` removes it", param="model")
        try:
            found = await asyncio.to_thread(named_one, name)
        except ConfigError as error:
            raise NotKeptError(str(error), param="model") from None
        try:
            return await asyncio.to_thread(removed, found)
        except ConfigError as error:
            raise ConflictError(str(error), param="model") from None
        except OSError as error:
            raise UnavailableError(f"{name}: {error.strerror}") from None


def _kept() -> list[dict[str, Any]]:
    found = [
        {
            "name": one.name,
            "bytes": one.num_bytes,
            "shared_bytes": one.shared_bytes,
            "is_whole": one.is_whole,
            "is_served": one.is_served,
        }
        for one in kept_models()
    ]
    packaged = [(name, file) for name in NAMED if is_kept(name) and (file := kept(name)) is not None]
    return found + [
        {"name": name, "bytes": file.stat().st_size, "shared_bytes": 0, "is_whole": True, "is_served": is_served(file)}
        for name, file in packaged
    ]


async def _fetcher(name: str) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.fetch",
            name,
            env=service_environment(),
            stdin=DEVNULL,
            stdout=PIPE,
            limit=MAX_LINE,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    except OSError as error:
        raise UnavailableError(f"{name}: nothing can be fetched now: {error.strerror}") from None


async def _steps(process: Process, name: str) -> AsyncGenerator[dict[str, Any], None]:
    """The steps that the process tells, until its end. Raises ModelNotFoundError, UnavailableError."""
    assert process.stdout is not None
    async for line in process.stdout:
        step = json.loads(line)
        if "error" in step:
            raise (
                ModelNotFoundError(step["error"], param="model") if step["missing"] else UnavailableError(step["error"])
            )
        yield step
    if code := await process.wait():
        raise UnavailableError(f"{name}: the process that fetched it ended with {code}")
