"""A NATS server of each module's own, and short times."""

from __future__ import annotations

import pytest

from gateway.batches import runner, steps
from gateway.keeping import streams
from tests.integration.kept_streams import quick_streams, url

__all__ = ["quick_streams", "url"]  # fixtures


@pytest.fixture
def soon_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For who waits until a silent gateway's work goes elsewhere. Others may be silent for long, and keep theirs."""
    monkeypatch.setattr(streams, "ACK_WAIT_S", 1.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that only decide how long a test takes."""
    monkeypatch.setattr(steps, "STEP_INTERVAL_S", 0.05)
    monkeypatch.setattr(steps, "FAILURE_RETRY_S", 0.1)
    monkeypatch.setattr(runner, "RETRY_S", 0.02)
    monkeypatch.setattr(runner, "MAX_DELAY_S", 0.2)
    monkeypatch.setattr(runner, "WATCH_S", 0.1)
    monkeypatch.setattr(runner, "STATUS_FOR_S", 0.1)
    monkeypatch.setattr(runner, "KEEP_RETRY_S", 0.05)
