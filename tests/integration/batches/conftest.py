"""A NATS server of each module's own, and short times."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.answers.tokenizer import ChatTokenizer
from gateway.batches import runner, steps
from gateway.keeping import streams
from services.runtime.servers import run_nats
from tests.models import build_tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A server of this module's own: it counts what is in the streams."""
    async with run_nats(data_dir=tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return ChatTokenizer(folder)


@pytest.fixture
def soon_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For who waits until a silent gateway's work goes elsewhere. Others may be silent for long, and keep theirs."""
    monkeypatch.setattr(streams, "ACK_WAIT_S", 1.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that only decide how long a test takes."""
    monkeypatch.setattr(streams, "ACK_WAIT_S", 30.0)
    monkeypatch.setattr(streams, "PULL_S", 0.3)
    monkeypatch.setattr(streams, "BEAT_S", 0.2)
    monkeypatch.setattr(steps, "STEP_INTERVAL_S", 0.05)
    monkeypatch.setattr(steps, "FAILURE_RETRY_S", 0.1)
    monkeypatch.setattr(runner, "RETRY_S", 0.02)
    monkeypatch.setattr(runner, "MAX_DELAY_S", 0.2)
    monkeypatch.setattr(runner, "WATCH_S", 0.1)
    monkeypatch.setattr(runner, "STATUS_FOR_S", 0.1)
    monkeypatch.setattr(runner, "KEEP_RETRY_S", 0.05)
