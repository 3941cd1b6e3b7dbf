"""The processes of `baton up`: servers first, then workers and the gateway, each restarted when it dies, all stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from common.config import (
    PREFIX,
    ROOT,
    ConfigError,
    GatewaySettings,
    UpSettings,
    WorkerOptions,
    as_environment,
)
from common.errors import UnavailableError
from common.servers import die_with_parent, port_is_free, run_nats, run_redis, stop

START_TIMEOUT_S = 180.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
LAST_LINES = 5


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A service that is kept running."""

    name: str
    service: str
    settings: dict[str, str]
    process: asyncio.subprocess.Process | None = None
    deaths: list[float] = field(default_factory=list)


class Stack:
    """Starts and watches. Used as a context: whatever happens inside, leaving it stops every process it started."""

    def __init__(self, settings: UpSettings, *, say: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._say = say or (lambda line: print(line, flush=True))
        self._servers = contextlib.AsyncExitStack()
        self._children: list[Child] = []
        self._data = settings.data_dir.resolve()
        self._logs = self._data / "logs"

    @property
    def url(self) -> str:
        return f"http://{self._settings.host}:{self._settings.port}"

    async def __aenter__(self) -> Stack:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._children:
            self._say("stopping: finishing what runs …")
        gateways = [child for child in self._children if child.service == "gateway"]
        workers = [child for child in self._children if child.service != "gateway"]
        for group in (gateways, workers):  # the gateway first: workers finish what it still waits for
            await asyncio.gather(*(self._stop(child) for child in group))
        await self._servers.aclose()
        if self._children:
            self._say("stopped")

    async def start(self, stopping: asyncio.Event) -> None:
        """Bring everything up and say so. Raises ConfigError or UnavailableError with one line that says what to do."""
        began = time.monotonic()
        self._check()
        self._logs.mkdir(parents=True, exist_ok=True)
        self._say("starting NATS and Redis …")
        nats = await self._servers.enter_async_context(
            run_nats(data_dir=self._data / "nats", log_file=self._logs / "nats.log")
        )
        redis = await self._servers.enter_async_context(
            run_redis(data_dir=self._data / "redis", log_file=self._logs / "redis.log")
        )
        addresses = {f"{PREFIX}NATS_URL": nats.url, f"{PREFIX}REDIS_URL": redis.url}
        self._children = self._plan(addresses)
        for child in self._children:
            self._say(f"starting {child.name} …")
            await self._spawn(child)
        await self._until_ready(stopping)
        if not stopping.is_set():
            self._welcome(time.monotonic() - began)

    async def watch(self, stopping: asyncio.Event) -> None:
        """Restart what dies, with growing pauses, until `stopping`. What dies again and again stops everything."""
        watchers = [asyncio.create_task(self._keep(child, stopping)) for child in self._children]
        waiting = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait([waiting, *watchers], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiting}:
                task.result()
        finally:
            for task in (waiting, *watchers):
                task.cancel()
            await asyncio.wait([waiting, *watchers])

    # -- plan ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        settings = self._settings
        if not (settings.model / "config.json").is_file():
            raise ConfigError(f"--model {settings.model}: no config.json there; give a Hugging Face model folder")
        if not port_is_free(settings.port, settings.host):
            raise ConfigError(f"--port {settings.port}: in use; stop what uses it, or choose another port")

    def _plan(self, addresses: dict[str, str]) -> list[Child]:
        settings = self._settings
        worker = as_environment(settings, WorkerOptions) | addresses
        children = [
            Child(name=name, service=role, settings=worker | {f"{PREFIX}WORKER_ID": name})
            for role, count in (("prefill", settings.prefill), ("decode", settings.decode))
            for name in (f"{role}-{index}" for index in range(count))
        ]
        gateway = as_environment(settings, GatewaySettings) | addresses
        return [*children, Child(name="gateway", service="gateway", settings=gateway)]

    # -- processes -------------------------------------------------------------------------------------------------

    async def _spawn(self, child: Child) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        with self._log_file(child).open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"services.{child.service}",
                env=environment | child.settings | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others in order
            )

    async def _keep(self, child: Child, stopping: asyncio.Event) -> None:
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if stopping.is_set():
                return
            now = time.monotonic()
            child.deaths = [at for at in child.deaths if now - at < RESTART_WINDOW_S] + [now]
            self._say(f"{child.name} ended with {_describe(code)}; its last lines:\n{self._last_lines(child)}")
            if len(child.deaths) > MAX_RESTARTS:
                raise UnavailableError(
                    f"{child.name} died {len(child.deaths)} times in a minute; see {self._log_file(child)}"
                )
            await asyncio.sleep(min(5.0, 0.2 * 2 ** len(child.deaths)))
            self._say(f"restarting {child.name} …")
            await self._spawn(child)

    async def _stop(self, child: Child) -> None:
        if child.process is not None:
            await stop(child.process, timeout_s=self._settings.drain_s + 10)

    async def _until_ready(self, stopping: asyncio.Event) -> None:
        """Wait for the gateway to say that a request would be served; give up when a process ends."""
        headers = {"authorization": f"Bearer {self._settings.api_keys.partition(',')[0]}"}
        give_up_at, told = time.monotonic() + START_TIMEOUT_S, ""
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=2.0) as client:
            while not stopping.is_set():
                for child in self._children:
                    if child.process is not None and child.process.returncode is not None:
                        raise UnavailableError(
                            f"{child.name} ended with {_describe(child.process.returncode)}: {self._last_lines(child, 1)}"
                        )
                reason = await _reason_not_ready(client, prefill=self._settings.prefill, decode=self._settings.decode)
                if reason is None:
                    return
                if reason != told:
                    self._say(f"waiting: {reason} …")
                    told = reason
                if time.monotonic() > give_up_at:
                    raise UnavailableError(f"not ready after {START_TIMEOUT_S:.0f} s: {reason}; see {self._logs}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), 0.1)

    # -- words -----------------------------------------------------------------------------------------------------

    def _welcome(self, seconds: float) -> None:
        settings = self._settings
        key = ' -H "authorization: Bearer $BATON_API_KEY"' if settings.api_keys else ""
        body = (
            f'{{"model": "{settings.served_name}", '
            '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
        )
        self._say(
            f"\nBaton serves {settings.served_name} at {self.url} ({seconds:.1f} s). "
            f"{settings.prefill} prefill, {settings.decode} decode, transport {settings.transport}; logs in {self._logs}\n"
            f"\n  curl {self.url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'\n"
            f"\nCtrl-C drains and stops everything."
        )

    def _log_file(self, child: Child) -> Path:
        return self._logs / f"{child.name}.log"

    def _last_lines(self, child: Child, count: int = LAST_LINES) -> str:
        with contextlib.suppress(OSError):
            lines = self._log_file(child).read_text(errors="replace").splitlines()[-count:]
            return "\n".join(f"  {line}" if count > 1 else line for line in lines)
        return ""


async def _reason_not_ready(client: httpx.AsyncClient, *, prefill: int, decode: int) -> str | None:
    """Why a request would not be served as asked for yet; None when it would."""
    try:
        response = await client.get("/ready")
    except httpx.HTTPError:
        return "the gateway starts"
    answer: dict[str, Any] = response.json()
    if response.status_code != 200:
        return str(answer.get("reason"))
    workers = answer["workers"]
    if workers["prefill"] < prefill or workers["decode"] < decode:
        return f"{workers['prefill']} of {prefill} prefill and {workers['decode']} of {decode} decode workers are ready"
    return None


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
