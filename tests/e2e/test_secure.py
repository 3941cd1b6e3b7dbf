"""A whole Baton as deploy/ ships it for use between hosts: a user for each process, TLS with certificates on both sides."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest
import redis.asyncio
import redis.exceptions

from tests.certificates import make_certificates
from tests.e2e.cluster import ROOT, Cluster
from tests.models import build_tiny_model
from tests.secure_servers import redis_speaks_tls

FAKE = {"fake": True, "kv_memory_mb": 8, "fake_step_ms": 5}


@pytest.mark.skipif(not redis_speaks_tls(), reason="this Redis has no TLS: make redis-7")
async def test_requests_are_placed_by_redis_and_handed_over_with_tls_to_both_servers(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    model = build_tiny_model(tmp_path / "tiny", "llama")
    async with Cluster(tmp_path / "run", model=model, certificates=certificates, **FAKE) as cluster:  # type: ignore[arg-type]
        body = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 12, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            for _ in range(2):
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
                assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96  # all full blocks

        trusted = {
            "ssl_ca_certs": certificates.ca,
            "ssl_certfile": certificates.client,
            "ssl_keyfile": certificates.client_key,
        }
        async with redis.asyncio.Redis.from_url(cluster.redis.url, protocol=2, **trusted) as store:
            assert await store.smembers("baton:workers") == {b"prefill-0", b"decode-0"}
            assert int((await store.info("commandstats"))["cmdstat_fcall"]["failed_calls"]) == 0
            refused = [entry[b"object"] for entry in await acl_log(store)]
            assert set(refused) <= {b"function|load"}  # workers try it once, at their start: it is the gateway's
        examined = await doctor(cluster)
        assert {one["check"] for one in examined} >= {"nats", "redis"}
        assert "fail" not in {one["level"] for one in examined if one["check"] in ("nats", "redis")}, examined
        in_the_clear = redis.asyncio.Redis(port=cluster.redis.port, protocol=2)
        with pytest.raises(redis.exceptions.ConnectionError):
            await in_the_clear.ping()
        await in_the_clear.aclose()


async def doctor(cluster: Cluster) -> list[dict[str, str]]:
    """What `baton doctor` finds as the observer."""
    flags = [*cluster.reach("nats", "observer"), *cluster.reach("redis", "observer")]
    words = [sys.executable, "-m", "cli.doctor", "--json", *flags]
    process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    found: list[dict[str, str]] = json.loads(said)
    return found


async def acl_log(store: redis.asyncio.Redis) -> list[dict[bytes, bytes]]:
    """What users tried and may not."""
    entries = await store.execute_command("ACL", "LOG")
    return [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in entries]
