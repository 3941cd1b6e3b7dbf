"""Jobs to queue, and what is in the queue and among the dead letters."""

from __future__ import annotations

import nats

from common import subjects
from common.bus import Delivery, JobQueue, NatsBus, QueueLimits
from common.messages import (
    Ack,
    Job,
    SamplingParams,
    ToWorker,
)
from tests.integration.waiting import eventually

PATIENT = QueueLimits(ack_wait_s=60.0, max_deliver=2, max_jobs=20)
QUICK = QueueLimits(ack_wait_s=0.5, max_deliver=2, max_jobs=20)  # for who waits until a silent worker's job comes again


def a_job(request_id: str = "request", *, attempt: int = 1) -> Job:
    return Job(
        request_id=request_id,
        attempt=attempt,
        gateway="gateway",
        token_ids=b"\x01\x00\x00\x00",
        num_prompt_tokens=1,
        hash_root=b"root",
        sampling=SamplingParams(max_tokens=4),
        decode_workers=["decode-0"],
        deadline_ms=10_000,
    )


async def some_jobs(queue: JobQueue) -> list[Delivery]:
    return await eventually(lambda: queue.fetch(8, expires_s=2.0))


async def dead_letters(raw: nats.NATS) -> list[nats.js.api.RawStreamMsg]:
    jetstream = raw.jetstream()
    count = (await jetstream.stream_info(subjects.DEAD_STREAM)).state.messages
    return [await jetstream.get_msg(subjects.DEAD_STREAM, sequence + 1) for sequence in range(count)]


async def has_met_malformed(bus: NatsBus, count: int) -> bool:
    return bus.malformed == count


async def is_empty(raw: nats.NATS) -> bool:
    return (await raw.jetstream().stream_info(subjects.JOBS_STREAM)).state.messages == 0


async def acknowledge(message: ToWorker) -> Ack:
    """A handler."""
    return Ack(known=True)
