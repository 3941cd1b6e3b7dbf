"""A NATS server of each module's own, a store of responses in it, and gateways with scripted generations that share it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from common.tracing import NoTracer
from common.wire import NatsSettings, Wire, connect
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.responses import background, runner
from gateway.responses import store as store_module
from gateway.responses.records import ResponseLimits
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore, response_streams
from gateway.tenants.tenants import Tenants, hash_key
from tests.integration.kept_streams import quick_streams, url
from tests.unit.gateway.conftest import Gateway, run_gateway

__all__ = ["quick_streams", "url"]  # fixtures

ROOT = Path(__file__).resolve().parents[3]
KEYS = ("key-of-acme", "key-of-others")
LIMITS = ResponseLimits(store_bytes=16 << 20)


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """The demo model's: it has a template, and knows reasoning and calls by their marks."""
    return ChatTokenizer(ROOT / "demo")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that only decide how long a test takes."""
    monkeypatch.setattr(runner, "RETRY_S", 0.02)
    monkeypatch.setattr(runner, "FLUSH_S", 0.02)
    monkeypatch.setattr(runner, "WATCH_S", 0.05)
    monkeypatch.setattr(store_module, "FOLLOW_S", 0.1)
    monkeypatch.setattr(background, "KEEP_RETRY_S", 0.05)


@pytest_asyncio.fixture
async def store(url: str) -> AsyncIterator[ResponseStore]:
    async with connect(NatsSettings(url=url), name="test") as wire:
        opened = response_streams(wire, LIMITS)
        opened.open()
        yield ResponseStore(opened, LIMITS)
        await opened.close()


class One(Gateway):
    """A gateway and what it keeps."""

    kept: Responses

    def as_other(self) -> openai.AsyncOpenAI:
        return self.openai.with_options(api_key=KEYS[1])


@contextlib.asynccontextmanager
async def one_of(url: str, tokenizer: ChatTokenizer, limits: ResponseLimits = LIMITS) -> AsyncIterator[One]:
    """A gateway whose tenants are `KEYS`' owners."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        entries = [f'[tenants.tenant-{n}]\nkeys_sha256 = ["{hash_key(key).hex()}"]\n' for n, key in enumerate(KEYS)]
        file.write_text("".join(entries), encoding="utf-8")
        tenants = Tenants(path=file)
    settings, wire = HttpSettings(tenants=tenants), Wire()
    kept = Responses(wire, limits, tenants, tracer=NoTracer())
    async with run_gateway(tokenizer, settings, key=KEYS[0], responses=kept.connect) as gateway:
        await wire.open(NatsSettings(url=url), name="test")
        gateway.script.max_model_len = 4_096
        await kept.start()
        one = One(**vars(gateway))
        one.kept = kept
        one.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        try:
            yield one
        finally:
            await kept.stop()
            await wire.leave()


@pytest_asyncio.fixture
async def here(url: str, tokenizer: ChatTokenizer) -> AsyncIterator[One]:
    async with one_of(url, tokenizer) as one:
        yield one


@pytest_asyncio.fixture
async def there(url: str, tokenizer: ChatTokenizer) -> AsyncIterator[One]:
    """Another gateway."""
    async with one_of(url, tokenizer) as one:
        yield one
