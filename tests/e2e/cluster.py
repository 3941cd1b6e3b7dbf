"""A whole Baton in separate processes, for tests: real NATS, real Redis, real workers, a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import httpx

from common.store import RedisSettings
from common.tls import Tls
from services.runtime.linux import die_with_parent
from services.runtime.permissions import Member, Role, make_users
from services.runtime.servers import Server, run_nats, run_redis, stop
from services.up.servers import install_library
from tests import preloaded
from tests.certificates import Certificates
from tests.e2e.tuned import is_tuned
from tests.ports import own_port
from tests.secure_servers import run_secure_nats, run_secure_redis

ROOT = Path(__file__).resolve().parents[2]
WORKERS, OTHERS = ("services.worker.process",), ("services.gateway.process",)  # what they load
FAKE_COSTS = {"fake_step_ms": 1.0, "fake_token_us": 50.0}
READY_S = 180.0  # eight processes that load torch on two busy cores


class Cluster:
    """Starts on entry, stops on exit; on an error the ends of all logs are added to it."""

    beside_0_1_0 = False  # see `redis_rules`

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        prefill: int = 1,
        decode: int = 1,
        both: int = 0,
        gateways: int = 1,
        transport: str = "shm",
        fake: bool = False,
        drain_s: float = 5,
        gateway_options: tuple[str, ...] = (),
        planner_options: tuple[str, ...] = (),
        certificates: Certificates | None = None,
        others: Mapping[str, tuple[str, Path]] = MappingProxyType({}),
        **worker_options: object,
    ) -> None:
        """Each process has its own user on NATS and Redis; the URLs of `nats` and `redis` are the admin's.

        With `certificates` both servers run as deploy/ ships them for use between hosts: who comes without one stays out.

        `others`: worker -> name and folder of the model that it has instead of the cluster's.

        `url` is the first gateway's; with several, `urls` has each one's by its name: `gateway`, `gateway-1`, …
        """
        self.folder = folder
        self.gateways = ["gateway", *(f"gateway-{index}" for index in range(1, gateways))]
        self.names = [f"prefill-{index}" for index in range(prefill)]
        self.names += [f"decode-{index}" for index in range(decode)]
        self.names += [f"worker-{index}" for index in range(both)]
        self._expected = {"prefill": prefill + both, "decode": decode + both}
        self.processes: dict[str, asyncio.subprocess.Process | preloaded.Process] = {}
        self.url = ""
        self.urls: dict[str, str] = {}
        self._model = model
        self._others = others
        self._gateway_options = gateway_options
        self._planner_options = planner_options
        self._worker_options = {"transport": transport, "kv_memory_mb": 32, "threads": 1, **worker_options}
        costs = [str(self._worker_options.pop(name, cost)) for name, cost in FAKE_COSTS.items()]
        self._fake_device = ":".join(["fake", *costs]) if fake else ""
        self._drain_s = drain_s
        self._certificates = certificates
        members = [*(Member("gateway", name) for name in self.gateways), Member("planner"), Member("observer")]
        members += [Member(_role(name), name) for name in self.names]
        self.users = make_users(members, folder / "users", beside_0_1_0=self.beside_0_1_0)
        self._stack = contextlib.AsyncExitStack()
        self.nats: Server
        self.redis: Server

    async def __aenter__(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            await self.start_nats()
            await self.start_redis()
            self.urls = {name: f"http://127.0.0.1:{own_port()}" for name in self.gateways}
            self.url = self.urls["gateway"]
            for name in [*self.names, *self.gateways]:
                await self.start(name)
            await self.until_ready()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.logs())
        await self._close()

    async def start_nats(self, *, port: int = 0) -> None:
        """Start NATS with the cluster's users; later again, at the port that it had."""
        log_file, data, port = self.folder / "nats.log", self.folder / "nats", port or own_port()
        if self._certificates:
            server = run_secure_nats(
                port=port,
                data_dir=data,
                log_file=log_file,
                users=self.users.nats,
                certificates=self._certificates,
            )
        else:
            server = run_nats(port=port, data_dir=data, log_file=log_file, extra=self._nats_config())
        self.nats = await self._stack.enter_async_context(server)
        self.nats.login = self.users.admin_nats

    async def start_redis(self, *, port: int = 0) -> None:
        """Start Redis with the cluster's users and the function library; later again, at the port that it had."""
        data, users, port = self.folder / "redis", self.users.redis, port or own_port()
        if self._certificates:
            server = run_secure_redis(port=port, data_dir=data, users=users, certificates=self._certificates)
        else:
            server = run_redis(port=port, data_dir=data, users=users)
        self.redis = await self._stack.enter_async_context(server)
        self.redis.login = self.users.admin_redis
        await install_library(
            RedisSettings(url=self.redis.url, tls=self._certificates.of_client if self._certificates else Tls())
        )

    async def start(self, name: str) -> None:
        """Start one of the services, again if it was there before. A planner is started by the test that wants one."""
        service = name.partition("-")[0]
        if service == "planner":
            options = [*self.reach("nats", "planner", name), "--planner-id", name, *self._planner_options]
        else:
            options = self._gateway_flags(name) if service == "gateway" else self._worker_flags(name)
        root = self._root(name)
        env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        env |= {"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            if root == ROOT:
                loads = OTHERS if service in ("gateway", "planner") else WORKERS
                files = (log.fileno(), log.fileno())
                module = f"services.{service}"
                if is_tuned(service, options):
                    module, options = "tests.e2e.tuned", [service, *options]
                self.processes[name] = await preloaded.start(
                    module, options, loads=loads, env=env, files=files, leaves_at_once=True
                )
            else:  # another release
                self.processes[name] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", f"services.{service}", *options),
                    env=env, cwd=root, stdout=log, stderr=log, preexec_fn=die_with_parent,
                )  # fmt: skip

    def kill(self, name: str) -> None:
        """End a service as a crash would."""
        self.processes[name].kill()

    def pause(self, name: str) -> None:
        """Stop a service without its noticing."""
        self.processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a paused service go on."""
        self.processes[name].send_signal(signal.SIGCONT)

    async def until_ready(self) -> None:
        """Wait until each gateway would serve and every worker said to it that it is ready."""
        for url in self.urls.values():
            await self._until_ready(url)

    async def _until_ready(self, url: str) -> None:
        give_up_at = time.monotonic() + READY_S
        async with httpx.AsyncClient(base_url=url, timeout=2.0, verify=False) as client:
            while time.monotonic() < give_up_at:
                dead = [name for name, process in self.processes.items() if process.returncode is not None]
                if dead:
                    raise RuntimeError(f"{dead} ended\n{self.logs()}")
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get("/ready")
                    if answer.status_code == 200 and answer.json()["workers"] == self._expected:
                        return
                await asyncio.sleep(0.05)
        raise TimeoutError(f"not ready\n{self.logs()}")

    def logs(self, lines: int = 25) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            for path in sorted(self.folder.glob("*.log"))
            if path.name != "nats.log"
        )

    def _root(self, name: str) -> Path:
        """The folder whose code a service runs."""
        return ROOT

    def _gateway_flags(self, name: str) -> list[str]:
        """Prompts are handed over, however short, unless a test wants to see the choice."""
        always = ["--local-prefill-tokens", "0"]
        return [
            *self._common(name),
            "--gateway-id",
            name,
            *always,
            "--port",
            self.urls[name].rpartition(":")[2],
            *self._gateway_options,
        ]

    def _worker_flags(self, name: str) -> list[str]:
        flags = [*self._common(name), "--worker-id", name]
        flags += ["--device", self._fake_device] if self._fake_device else []
        for option, value in self._worker_options.items():
            flags += [f"--{option.replace('_', '-')}", str(value)]
        return flags

    def _common(self, user: str) -> list[str]:
        servers = [*self.reach("nats", user), *self.reach("redis", user)]
        name, folder = self._others.get(user, ("tiny", self._model))
        return [*servers, "--model", str(folder), "--served-model-name", name, "--drain-s", f"{self._drain_s:g}"]

    def reach(self, server: str, user: str, name: str = "") -> list[str]:
        """How a process, `name` if not `user`, reaches NATS or Redis as `user`."""
        login = {"nats": self.users.nats_file, "redis": self.users.redis_file}[server](user)
        flags = [f"--{server}-url", self._address(server, name or user), f"--{server}-credentials", str(login)]
        if self._certificates:
            tls = self._certificates.of_client
            files = {"ca": tls.ca, "cert": tls.cert, "key": tls.key}
            flags += [word for part, file in files.items() for word in (f"--servers-{part}", str(file))]
        return flags

    def _nats_config(self) -> str:
        """What is in NATS' configuration beside the shipped one."""
        return self.users.nats

    def _address(self, server: str, user: str) -> str:
        """Where `user` reaches NATS or Redis."""
        return {"nats": self.nats, "redis": self.redis}[server].address

    async def _close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        await asyncio.gather(*(stop(process, timeout_s=10) for process in self.processes.values()))
        await self._stack.aclose()


def _role(name: str) -> Role:
    """The role in a worker's name."""
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "worker": "worker"}
    return roles[name.partition("-")[0]]
