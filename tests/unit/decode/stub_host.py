"""What the roles see of a worker, without a bus: what they send is kept, and the device's threads run by hand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from common.blocks import pack_tokens, unpack_tokens
from common.messages import Failed, Job, SamplingParams, Tokens
from common.tracing import NoTracer
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.fake import FakeEngine
from worker.device import DeviceLoop, SteppingEngine
from worker.host import WorkerSettings
from worker.jobs import ClaimedJob
from worker.totals import Totals

BLOCK = 4


def new_fake_engine(num_blocks: int, **kwargs: Any) -> FakeEngine:
    config = EngineConfig(model=Path("fake"), num_blocks=num_blocks, block_size=BLOCK, max_model_len=60)
    return FakeEngine(config, sleep=None, **kwargs)


def new_job(name: str, prompt: list[int], sampling: SamplingParams, *, prefill: bool = False, priority: int = 0) -> Job:
    """A job for the decode role, or with `prefill` for the prefill role."""
    return Job(
        request_id=name,
        attempt=1,
        gateway="gw",
        token_ids=pack_tokens(prompt),
        num_prompt_tokens=len(prompt),
        hash_root=bytes(16),
        sampling=sampling,
        decode_workers=["elsewhere"] if prefill else [],
        deadline_ms=60_000,
        priority=priority,
    )


def claim(job: Job) -> ClaimedJob:
    return ClaimedJob(job=job, delivery=cast(Any, None), claimed_at=0.0, deadline_at=1e12)


class HandThread:
    """An executor whose work is done when the test says so, by the test's thread."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, function: Callable[..., object], *args: object) -> None:
        self._queue.append(lambda: function(*args))

    def run_next(self) -> None:
        self._queue.popleft()()

    def shutdown(self, *, wait: bool) -> None:
        while self._queue:
            self.run_next()


class StubHost:
    """Takes the place of `WorkerHost` for a role. `streams` and `ended` hold what each request's gateway was told."""

    def __init__(
        self, engine: FakeEngine, *, launcher: SteppingEngine | None = None, token_budget: int, max_sequences: int = 8
    ) -> None:
        self.engine = engine
        self.pool = BlockPool(num_blocks=engine.layout.num_blocks, block_size=BLOCK)
        self.settings = WorkerSettings(served_model="m", tokenizer_fingerprint="t", max_sequences=max_sequences)
        self.max_model_len = min(engine.max_model_len, self.pool.num_blocks * BLOCK)
        self.worker_id, self.incarnation = "w", 1
        self.tracer = NoTracer()
        self.totals = Totals()
        self.device = DeviceLoop(engine=launcher or engine, token_budget=token_budget)
        self.launching, self.waiting = HandThread(), HandThread()
        self.device._device_thread, self.device._waiting_thread = self.launching, self.waiting  # type: ignore[assignment]
        self.told: list[object] = []  # messages that were published
        self.streams: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}  # "stop", "length", "settled", "dropped" or why it failed
        self.outbox = SimpleNamespace(add=self._add)
        self.jobs = SimpleNamespace(room_changed=lambda: None, settle=self._settle, drop=self._drop, fail=self._fail)
        self.bus = SimpleNamespace(publish=self._publish)
        self.peers = SimpleNamespace(states={})
        self.roles = SimpleNamespace(active=[])
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _add(self, gateway: str, tokens: Tokens) -> None:
        stream = self.streams.setdefault(tokens.request_id, [])
        assert tokens.position == len(stream), "a token was lost or sent twice"
        assert tokens.request_id not in self.ended or self.ended[tokens.request_id] == "settled"
        stream += unpack_tokens(tokens.token_ids)
        if tokens.finish:
            self.ended[tokens.request_id] = tokens.finish

    async def _settle(self, claimed: ClaimedJob, **_: object) -> None:
        self.ended.setdefault(claimed.job.request_id, "settled")

    async def _drop(self, claimed: ClaimedJob) -> None:
        self.ended.setdefault(claimed.job.request_id, "dropped")

    async def _fail(self, claimed: ClaimedJob, *, message: str, **_: object) -> None:
        self.ended[claimed.job.request_id] = message

    async def _publish(self, subject: str, message: object) -> None:
        self.told.append(message)
        if isinstance(message, Failed):
            self.ended[message.request_id] = message.message
