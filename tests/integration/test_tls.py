"""TLS to NATS and Redis and of the gateway's HTTP, with certificates made here: whom we don't trust, we don't talk to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.bus import NatsSettings, connect_bus
from common.errors import UnavailableError
from common.settings import ConfigError
from common.store import RedisSettings, connect_store
from common.tls import Tls
from gateway.placement.ledger import function_libraries
from services.runtime.linux import die_with_parent
from services.runtime.servers import Server, run_redis, stop
from tests.certificates import Certificates, make_certificates
from tests.integration.fleet import a_worker
from tests.integration.waiting import LIMIT_S, refusal
from tests.models import build_tiny_model
from tests.ports import own_port
from tests.secure_servers import redis_speaks_tls, run_secure_nats, run_secure_redis

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of an authority that nobody here trusts."""
    return make_certificates(tmp_path_factory.mktemp("others"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nats(ours: Certificates, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """NATS with deploy/nats/secure.conf, but no users: it wants a certificate from both sides."""
    async with run_secure_nats(data_dir=tmp_path_factory.mktemp("nats"), certificates=ours) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis_port(ours: Certificates, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[int]:
    """Redis with deploy/redis/secure.conf, but no users. The server of the Python package has no TLS: there a proxy ends it."""
    data_dir = tmp_path_factory.mktemp("redis")
    if redis_speaks_tls():
        async with run_secure_redis(data_dir=data_dir, certificates=ours) as server:
            yield server.port
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.server, ours.server_key)
    context.load_verify_locations(ours.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    async with run_redis(data_dir=data_dir) as server:

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))

        proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
        async with proxy:
            yield proxy.sockets[0].getsockname()[1]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(65_536):
            writer.write(part)
            await writer.drain()
    writer.close()


async def test_nats_over_tls_carries_what_the_bus_does(nats: Server, ours: Certificates) -> None:
    settings = NatsSettings(url=nats.address, tls=ours.of_client, connect_timeout_s=LIMIT_S)
    async with connect_bus(settings, name="test") as bus:  # makes streams: requests and answers work
        assert bus.connected


async def test_nats_without_our_certificate_or_encryption_lets_nobody_in(nats: Server, ours: Certificates) -> None:
    for settings in (
        NatsSettings(url=nats.address, tls=Tls(ca=ours.ca)),
        NatsSettings(url=nats.address.replace("tls://", "nats://")),
    ):
        await refusal(settings, r"no NATS server at ")


async def test_a_nats_server_of_another_authority_is_not_trusted(nats: Server, theirs: Certificates) -> None:
    settings = NatsSettings(url=nats.address, tls=Tls(ca=theirs.ca))
    assert await refusal(settings, r"(?i)certificate verify failed")


async def test_redis_over_tls_answers_and_another_authority_is_not_trusted(
    redis_port: int, ours: Certificates, theirs: Certificates
) -> None:
    url = f"rediss://127.0.0.1:{redis_port}"
    async with connect_store(
        RedisSettings(url=url, tls=ours.of_client, timeout_s=LIMIT_S), libraries=function_libraries()
    ) as store:
        assert await store.register(a_worker("w", "decode"))
        assert await store.call("baton4_charged", "decode", "w", timeout_s=LIMIT_S) == 0
    for other in (Tls(ca=theirs.ca, cert=ours.client, key=ours.client_key), Tls(ca=ours.ca)):
        async with connect_store(RedisSettings(url=url, tls=other, timeout_s=LIMIT_S)) as store:
            with pytest.raises(UnavailableError, match=r"Redis: .*"):
                await store.register(a_worker("w", "decode"))


async def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=r"ca\.pem: No such file"):
        async with connect_bus(NatsSettings(url="tls://127.0.0.1:1", tls=Tls(ca=missing)), name="test"):
            pass
    with pytest.raises(ConfigError, match=r"ca\.pem: No such file"):
        async with connect_store(RedisSettings(url="rediss://127.0.0.1:1", tls=Tls(ca=missing))):
            pass


async def test_a_gateway_serves_https_and_reaches_both_servers_by_tls(
    nats: Server, redis_port: int, ours: Certificates, theirs: Certificates, tmp_path: Path
) -> None:
    """The process itself, with its settings: what the other tests here do with objects."""
    model = build_tiny_model(tmp_path / "tiny", "llama")
    port = own_port()
    flags = {
        "nats-url": nats.address,
        "redis-url": f"rediss://127.0.0.1:{redis_port}",
        "servers-ca": ours.ca,
        "servers-cert": ours.client,
        "servers-key": ours.client_key,
        "tls-cert": ours.server,
        "tls-key": ours.server_key,
        "model": model,
        "port": port,
    }
    log_file = tmp_path / "gateway.log"
    with log_file.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway"),
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,
        )
    try:
        url = f"https://127.0.0.1:{port}"
        trusting = ssl.create_default_context(cafile=ours.ca)
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=trusting) as client:
            async with asyncio.timeout(60):
                while True:
                    assert process.returncode is None, log_file.read_text()
                    with contextlib.suppress(httpx.TransportError):
                        answer = await client.get("/health")
                        break
                    await asyncio.sleep(0.05)
        assert answer.json() == {"status": "ok"}
        distrusting = ssl.create_default_context(cafile=theirs.ca)
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=distrusting) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/health")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/health")
    finally:
        await stop(process)
    assert "unavailable" not in log_file.read_text()
