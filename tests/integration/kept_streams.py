"""What tests of kept streams share: a NATS server of a module's own, and short times."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.keeping import streams
from services.runtime.servers import run_nats


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A server of this module's own: it counts what is in the streams."""
    async with run_nats(data_dir=tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture(autouse=True)
def quick_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that only decide how long a test takes."""
    monkeypatch.setattr(streams, "ACK_WAIT_S", 30.0)
    monkeypatch.setattr(streams, "PULL_S", 0.3)
    monkeypatch.setattr(streams, "BEAT_S", 0.2)
