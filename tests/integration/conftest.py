"""Fixtures of the integration tests: a small tokenizer, a flushed server, the store on it, and the ledger on that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from common.store import connect_store
from gateway.answers.tokenizer import ChatTokenizer
from gateway.placement.ledger import Ledger, function_libraries
from tests.integration.fleet import FleetStore, patient
from tests.integration.waiting import LIMIT_S
from tests.models import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return ChatTokenizer(folder)


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain client on a server that was flushed."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def store(redis_url: str, raw: redis.asyncio.Redis) -> AsyncIterator[FleetStore]:
    async with connect_store(patient(redis_url), libraries=function_libraries()) as store:
        yield FleetStore(store)


@pytest.fixture
def ledger(store: FleetStore) -> Ledger:
    return patient_ledger(store)


def patient_ledger(store: Any) -> Ledger:
    """A ledger whose calls may take long."""
    return Ledger(store, place_timeout_s=LIMIT_S, timeout_s=LIMIT_S)
