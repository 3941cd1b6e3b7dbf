"""Workers that a host may put to sleep, known from their settings."""

from __future__ import annotations

import pytest

from services.host.needs import can_sleep
from services.worker.options import WorkerOptions


@pytest.mark.parametrize(
    ("settings", "ranks", "sleeps"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"transport": "ucx"}, 1, False),
        ({"device": "cuda:1", "transport": "local"}, 2, False),
        ({"device": "cuda:1", "transport": "local"}, 1, True),
        ({"device": "cuda:1", "transport": "local", "kv_host_mb": "64"}, 1, False),
        ({"device": "cuda:1"}, 1, False),
        ({"device": "cuda:1", "transport": "ucx"}, 1, False),
    ],
)
def test_one_sleeps_whose_memory_nobody_knows_by_address(settings: dict[str, str], ranks: int, sleeps: bool) -> None:
    assert can_sleep(WorkerOptions(**settings), processes=ranks) is sleeps  # type: ignore[arg-type]
