"""The process tree of `baton up`: servers first, then workers and the gateway. Dead ones restart; all stop together."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from common import PREFIX
from common.errors import UnavailableError
from common.settings import ConfigError
from common.tasks import cancel_all
from services.gateway.settings import GatewaySettings
from services.host.child import Child, describe_exit, last_lines, why_ended
from services.host.nursery import Nursery
from services.host.plan import write_plan
from services.planner.settings import PlannerSettings
from services.runtime.loading import as_environment
from services.runtime.names import TAG, made_up_tag
from services.runtime.permissions import WORKERS, Member
from services.runtime.servers import Server, held_port
from services.runtime.settings import HostOptions
from services.up.announcement import announce, forget, welcome
from services.up.checks import in_use
from services.up.members import Deals, Hosted, is_hosted, members_of, models_of_workers
from services.up.readiness import models_of, reason_not_ready
from services.up.servers import Reach, start_servers
from services.up.settings import UpSettings
from services.up.standstill import standing
from services.worker.options import WorkerOptions

START_TIMEOUT_S = 180.0
MAX_RESTARTS = 5  # per service and window; then everything stops
RESTART_WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5  # before the second restart, then doubled
LONGEST_PAUSE_S = 5.0
LAST_LINES = 5
HOST_PLAN = "host.json"
STOP_MARGIN_S = 10.0  # added to the drain time before a process is killed


class Stack:
    """The supervisor. Leaving the context stops every process that it started."""

    def __init__(self, settings: UpSettings, *, say: Callable[[str], None], nursery: Nursery | None = None) -> None:
        """`nursery`: forks workers, closed here at the end; None: each is started directly."""
        self._settings = settings
        self._nursery = nursery
        self._say = say
        self._held = contextlib.AsyncExitStack()
        self._found = contextlib.ExitStack()  # tools find this stack while it is open
        self._servers: list[Server] = []
        self._children: list[Child] = []
        self._data = settings.data_dir.resolve()
        self._logs = self._data / "logs"

    @property
    def url(self) -> str:
        return self._url(self._settings.port)

    @property
    def own_urls(self) -> list[str]:
        """URLs of the gateways' own ports; none if there is only one gateway."""
        return [self._url(port) for port in self._settings.own_ports]

    def _url(self, port: int) -> str:
        host = self._settings.host
        scheme = "https" if self._settings.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children)

    async def __aenter__(self) -> Stack:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._found.close()
        if self._nursery is not None:
            self._nursery.close()
        if self._children:
            self._say("stopping: finishing what runs … (Ctrl-C again stops at once)")
        gateways = [child for child in self._children if child.service == "gateway"]
        workers = [child for child in self._children if child.service != "gateway"]
        for group in (gateways, workers):  # the gateway first: workers finish what it still waits for
            await asyncio.gather(*(child.stop(timeout_s=self._settings.drain_s + STOP_MARGIN_S) for child in group))
        await self._held.aclose()
        if self._children:
            self._say("stopped")

    async def start(self, stopping: asyncio.Event) -> None:
        """Start everything and announce it. Raises ConfigError or UnavailableError with a one-line remedy."""
        began = time.monotonic()
        self._held.enter_context(_locked(self._data / "lock"))
        if self._settings.own_ports:
            self._hold_ports()
        self._logs.mkdir(exist_ok=True)
        forget(self._data)
        for log in self._logs.glob("*.log"):
            log.unlink()
        members = members_of(self._settings, tag_of(self._data))
        users = [*members.values(), Member("observer")]
        reach = await start_servers(self._settings, users, data=self._data, held=self._held, say=self._say)
        self._servers = reach.servers
        for child in self._plan(members, reach):
            self._say(f"starting {child.name} …")
            self._children.append(child)
        urls = (*self.own_urls, self.url)
        until = [self._start_all(stopping), *(self._until_ready(url, stopping) for url in urls)]
        starting = [asyncio.create_task(one) for one in until]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        if not stopping.is_set():
            announce(self._found, self._settings, reach, urls=(self.url, *self.own_urls), data=self._data)
            models = await models_of(self.url, next(iter(self._settings.keys), ""))
            seconds = time.monotonic() - began
            self._say(welcome(self._settings, self.url, self._data, models=models, seconds=seconds))

    async def _start_all(self, stopping: asyncio.Event) -> None:
        """Start all at once, unless `stopping`: workers may have to wait for the nursery."""
        if stopping.is_set():
            return
        each = [asyncio.create_task(child.start()) for child in self._children]
        starting = asyncio.gather(*each)
        told = asyncio.create_task(stopping.wait())
        told.add_done_callback(lambda _: starting.cancel())
        try:
            await starting
        except asyncio.CancelledError:
            if not stopping.is_set():
                raise
        finally:
            told.cancel()
            await cancel_all(each)  # one was refused: the others would start after all were stopped

    def _hold_ports(self) -> None:
        """Reserve the shared ports, so that another `baton up`'s gateways can't join them. Raises ConfigError."""
        for flag, port in self._settings.public_ports.items():
            try:
                self._held.enter_context(held_port(port, self._settings.host))
            except OSError:
                raise ConfigError(in_use(flag, port).said) from None

    async def watch(self, stopping: asyncio.Event) -> None:
        """Restart services that die, with growing pauses, until `stopping`.

        Raises UnavailableError, to stop everything, when a service keeps dying, or NATS or Redis ends.
        """
        if stopping.is_set():  # possibly before all were started
            return
        watchers = [asyncio.create_task(self._keep(child)) for child in self._children]
        watchers += [asyncio.create_task(self._guard(server)) for server in self._servers]
        gateways = [child for child in self._children if child.service == "gateway"]
        ports = self._settings.own_ports or (self._settings.port,)
        watchers += [asyncio.create_task(self._end_if_it_stands(*one)) for one in zip(gateways, ports, strict=True)]
        told = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait([told, *watchers], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {told}:
                task.result()
        finally:
            for task in (told, *watchers):
                task.cancel()
            await asyncio.wait([told, *watchers])

    # -- start -----------------------------------------------------------------------------------------------------

    def _plan(self, members: Mapping[str, Member], reach: Reach) -> list[Child]:
        settings = self._settings
        options = {
            "gateway": (as_environment(settings, GatewaySettings), "GATEWAY_ID"),
            "planner": (as_environment(settings, PlannerSettings), "PLANNER_ID"),
            "host": (as_environment(settings, HostOptions), "HOST_ID"),
        }
        of_workers = as_environment(settings, WorkerOptions), "WORKER_ID"
        own_ports = iter(settings.own_ports)
        deals = Deals(settings)
        models = iter(models_of_workers(settings))
        children: list[Child] = []
        hosted = Hosted(settings)
        for name, member in members.items():
            variables, own = options.get(member.role, of_workers)
            variables = variables | {f"{PREFIX}{own}": member.id} | reach.variables(member.user)
            log_file = self._logs / f"{name}.log"
            if member.role in (*WORKERS, "pool"):
                model = next(models)
                variables |= {f"{PREFIX}MODEL": str(model.folder), f"{PREFIX}SERVED_MODEL_NAME": model.name}
                slot = hosted.of(model) if member.role == "pool" else []
                variables |= deals.beside(slot) if slot else deals.next()
                if settings.loads_on_demand and is_hosted(member.role, model):
                    hosted.add(model, name, member, variables, log_file)
                    continue
            elif member.role == "gateway":
                variables[f"{PREFIX}OWN_PORT"] = str(next(own_ports, 0))
            elif member.role == "host":
                variables[f"{PREFIX}HOST_PLAN"] = str(self._data / HOST_PLAN)
            bear = self._nursery.born if self._nursery is not None and member.role in WORKERS else None
            children.append(Child(name=name, service=member.role, settings=variables, log_file=log_file, bear=bear))
        if not hosted.is_empty:
            write_plan(hosted.plan(), self._data / HOST_PLAN)
        return children

    async def _until_ready(self, url: str, stopping: asyncio.Event) -> None:
        """Wait until a gateway reports ready; give up when a process ends."""
        give_up_at, told = time.monotonic() + START_TIMEOUT_S, ""
        wanted = Counter(member.role for member in members_of(self._settings, "").values())
        if self._settings.loads_on_demand:
            wanted["prefill"] = wanted["decode"] = 0  # none is ready before it is asked for
            wanted["pool"] = self._settings.decodes.least * len(self._settings.pooling)
        while not stopping.is_set():
            for child in self._children:
                if child.exit_code is not None:
                    end = why_ended(child.log_file) or f"see {child.log_file}"
                    raise UnavailableError(f"{child.name} ended with {describe_exit(child.exit_code)}: {end}")
            reason = await reason_not_ready(url, {role: wanted[role] for role in ("prefill", "decode", "pool")})
            if reason is None:
                return
            if reason != told:
                self._say(f"waiting: {reason} …")
                told = reason
            if time.monotonic() > give_up_at:
                raise UnavailableError(f"not ready after {START_TIMEOUT_S:.0f} s: {reason}; see {self._logs}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), 0.1)

    # -- watch -----------------------------------------------------------------------------------------------------

    async def _keep(self, child: Child) -> None:
        deaths: list[float] = []
        while True:
            code = await child.wait()
            now = time.monotonic()
            deaths = [at for at in deaths if now - at < RESTART_WINDOW_S] + [now]
            self._say(f"{child.name} ended with {describe_exit(code)}; its last lines:{_indented(child.log_file)}")
            if len(deaths) > MAX_RESTARTS:
                raise UnavailableError(f"{child.name} died {len(deaths)} times in a minute; see {child.log_file}")
            await asyncio.sleep(restart_pause_s(len(deaths)))
            self._say(f"restarting {child.name} …")
            await child.start()

    async def _end_if_it_stands(self, gateway: Child, port: int) -> None:
        """Kill a stuck gateway; `_keep` restarts it."""
        while True:
            why = await standing(self._url(port), lambda: gateway.pid)
            self._say(f"{gateway.name} {why}: it is ended, and what it had with it")
            gateway.kill()

    async def _guard(self, server: Server) -> None:
        code = await server.process.wait()
        log_file = self._logs / f"{server.name}.log"
        self._say(f"{server.name} ended with {describe_exit(code)}; its last lines:{_indented(log_file)}")
        raise UnavailableError(f"{server.name} is gone, and with it what was under way: start again with `baton up`")


def tag_of(folder: Path) -> str:
    """Return the tag of this folder's processes: the same at each start, so that metrics keep their labels."""
    file = folder / "tag"
    known = file.read_text().strip() if file.is_file() else ""
    if not re.fullmatch(TAG, known):
        known = made_up_tag()
        file.write_text(f"{known}\n")
    return known


def restart_pause_s(deaths: int) -> float:
    """Seconds to wait before the restart after the n-th death in the window, n from 1."""
    return 0.0 if deaths == 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (deaths - 2))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock `path`, so that two `baton up` never share servers' data. The lock ends with the process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(f"--data-dir {path.parent}: {error.strerror}; name a folder that can be written to") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--data-dir {path.parent}: another `baton up` uses it; stop that one, or choose another folder"
            ) from None
        yield


def _indented(log_file: Path) -> str:
    return "".join(f"\n  {line}" for line in last_lines(log_file, LAST_LINES)) or " (none)"
