"""The longest sequence that a worker takes."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages import PagePart, Region
from common.peers import Peers
from kvtransfer.local import LocalTransport
from kvtransfer.transport import Transfers
from tests.fakes.bus import MemoryBus
from tests.fakes.device import HandThread
from tests.fakes.worker import BLOCK, new_fake_engine
from worker.device.launcher import Threads
from worker.identity import Identity, Messenger
from worker.settings import ModelIdentity, WorkerSettings
from worker.worker import Worker

KEYS = PagePart(layers=1, planes=2, heads=1, dim=4, dtype="float32")
NO_STORE: Any = None  # none is asked for anything
STATES = PagePart(layers=2, planes=1, heads=1, dim=24, dtype="float32", per_token=False)  # a block for each layer


@pytest.mark.parametrize(("parts", "longest"), [([KEYS], 5 * BLOCK), ([KEYS, STATES], 3 * BLOCK)])
async def test_it_fits_into_the_pool_beside_its_state(
    parts: list[PagePart], longest: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would never be admitted, and hold up all who wait behind it."""
    engine = new_fake_engine(5, parts=parts)
    worker = Worker(
        messenger=Messenger(identity=Identity("w", 1), bus=MemoryBus(), peers=Peers()),
        store=NO_STORE,
        engine=engine,
        transfers=Transfers(
            transport=LocalTransport(),
            region=Region(transport="memory", incarnation=1, layout=engine.layout, address={}),
        ),
        settings=WorkerSettings(served=ModelIdentity("m", "")),
        threads=Threads(HandThread(), HandThread()),
    )
    assert worker.context.model.max_model_len == longest
    state = worker.heartbeat.state()
    assert (state.max_model_len, state.whole_len) == (longest, engine.max_model_len)
    assert state.whole_kv_mb >= 1
    [cut] = [record for record in caplog.records if record.message == "worker.context_cut"]
    assert (cut.max_model_len, cut.of, cut.kv_memory_mb) == (longest, engine.max_model_len, state.whole_kv_mb)
