"""Steps of batches: check their lines, queue them gradually, finish.

Every unfinished batch has a step in the queue, which comes to some gateway every half second. So no gateway owns a batch, and
none is forgotten when a gateway dies. Steps may be repeated, even by two gateways at once: a line is queued once, a result
written once, and a record replaced only if it is still the one that was read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection

import msgspec

from common import subjects
from common.errors import ServingError, UnavailableError
from common.tasks import cancel_all
from gateway.batches.lines import SEALS, LineChecker, Packer, lines_of, parse_line, unanswered
from gateway.batches.records import (
    BatchRecord,
    FileRecord,
    Line,
    LineError,
    Result,
    Step,
    encode,
    result_decoder,
    step_decoder,
)
from gateway.batches.store import BatchStore, keep_record
from gateway.http.problem import NotKeptError
from gateway.keeping.layout import StoreFullError
from gateway.keeping.streams import Delivery

log = logging.getLogger("baton.batches")

STEP_INTERVAL_S = 0.5
CONFLICT_RETRY_S = 0.05
FAILURE_RETRY_S = 5.0  # pause after a crash
ORPHAN_AFTER_S = 60.0  # a step without a batch is dropped after this
MAX_CONCURRENT_STEPS = 8
# Maximum queued lines of a batch: batches take turns, and little of a cancelled one remains.
MAX_QUEUED_LINES = 1024


class Steps:
    """Runs the steps of all batches."""

    def __init__(self, store: BatchStore, *, models_of: Callable[[str], Collection[str]]) -> None:
        self._store = store
        self._streams = store.streams
        self._models_of = models_of
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self) -> None:
        while not self._stopping:
            if len(self._tasks) >= MAX_CONCURRENT_STEPS:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                continue
            deliveries = await self._streams.fetch("step", MAX_CONCURRENT_STEPS - len(self._tasks))
            if self._stopping:
                return  # too late: `KeptStreams.close` releases them
            for delivery in deliveries:
                task = asyncio.create_task(self._take(delivery))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Stop taking steps, and leave unfinished ones to other gateways."""
        self._stopping = True
        await cancel_all(self._tasks)

    async def _take(self, delivery: Delivery) -> None:
        try:
            step = step_decoder.decode(delivery.data)
        except msgspec.MsgspecError as error:
            log.error("batches.malformed_step", extra={"error": str(error)[:200]})
            await delivery.done()
            return
        delay: float | None = FAILURE_RETRY_S
        try:
            delay = await self.step(step)
        except ServingError as error:  # NATS is down, or full
            log.warning("batches.step_failed", extra={"error": error.message})
        except Exception:  # also a record of another release
            log.exception("batches.step_crashed", extra={"batch": step.batch})
        if delay is None:
            await delivery.done()
        else:
            await delivery.later(delay)

    async def step(self, step: Step) -> float | None:
        """Advance a batch; return the seconds until the next step, None at its end. Raises UnavailableError."""
        try:
            record, seq = await self._store.load(step.tenant, step.batch)
        except NotKeptError:
            return STEP_INTERVAL_S if time.time() - step.created_at < ORPHAN_AFTER_S else None
        while not record.is_over:
            before, record = record, await self._next(record)
            if record != before:
                seq = await self._streams.replace(record.subject, encode(record), seq=seq)
                if not seq:
                    return CONFLICT_RETRY_S  # cancelled meanwhile, or another gateway was first
            if record.status == before.status:
                return STEP_INTERVAL_S
            log.info("batch.status", extra={"batch": record.id, "status": record.status})
        await self._clear(record)
        return None

    async def _next(self, record: BatchRecord) -> BatchRecord:
        if record.status == "validating":
            return await self._validated(record)
        if record.status == "in_progress":
            return await self._progressed(record)
        return await self._ended(record)

    # -- validating ----------------------------------------------------------------------------------------------------

    async def _validated(self, record: BatchRecord) -> BatchRecord:
        checker = LineChecker(endpoint=record.endpoint, models=self._models_of(record.endpoint))
        try:
            async for part in self._store.parts(record.input_file_id, record.parts):
                await asyncio.to_thread(checker.check, part)
        except NotKeptError as error:
            return _failed(record, LineError(code="input_file_gone", message=error.message, param="input_file_id"))
        if not checker.total:
            return _failed(record, LineError(code="empty_file", message="the file has no lines", param="input_file_id"))
        if checker.errors:
            return _failed(record, *checker.errors)
        return record.to("in_progress", time.time(), total=checker.total, model=checker.model)

    # -- in progress ---------------------------------------------------------------------------------------------------

    async def _progressed(self, record: BatchRecord) -> BatchRecord:
        done = await self._streams.count(subjects.batch_result(record.id, "*"))
        failed = await self._streams.count(subjects.batch_failure(record.id, "*"))
        record = msgspec.structs.replace(record, completed=max(0, done - failed), failed=min(done, failed))
        if done >= record.total:
            return record.to("finalizing", time.time())
        if time.time() >= record.expires_at:
            return record.to("finalizing", time.time(), seal="batch_expired")
        try:
            return await self._queue(record, done)
        except NotKeptError:
            return record.to("finalizing", time.time(), seal="batch_expired")

    async def _queue(self, record: BatchRecord, done: int) -> BatchRecord:
        while record.queued_parts < record.parts and record.queued - done < MAX_QUEUED_LINES:
            count = len(lines_of(await self._store.part(record.input_file_id, record.queued_parts)))
            try:
                await asyncio.gather(*(self._queue_line(record, place) for place in range(count)))
            except StoreFullError:
                break  # nothing is queued twice
            record = msgspec.structs.replace(record, queued_parts=record.queued_parts + 1, queued=record.queued + count)
        return record

    async def _queue_line(self, record: BatchRecord, place: int) -> None:
        line = Line(
            batch=record.id,
            tenant=record.tenant,
            line=record.queued + place,
            endpoint=record.endpoint,
            file=record.input_file_id,
            part=record.queued_parts,
            place=place,
        )
        await self._streams.enqueue(subjects.batch_line(record.id, line.line), encode(line))

    # -- the end ---------------------------------------------------------------------------------------------------------

    async def _ended(self, record: BatchRecord) -> BatchRecord:
        if not record.total:  # cancelled before its lines were queued
            return record.to("cancelled", time.time())
        await self._streams.purge(subjects.batch_line(record.id, "*"), work=True)
        if record.seal:
            try:
                await self._seal(record)
            except NotKeptError as error:
                return _failed(record, LineError(code="input_file_gone", message=error.message, param="input_file_id"))
        output, errors = await self._files(record)
        changes = {
            "completed": output.lines if output else 0,
            "failed": errors.lines if errors else 0,
            "output_file_id": output.id if output else None,
            "error_file_id": errors.id if errors else None,
        }
        if record.status == "cancelling":
            return record.to("cancelled", time.time(), **changes)
        return record.to("expired" if record.seal else "completed", time.time(), **changes)

    async def _seal(self, record: BatchRecord) -> None:
        """Give every line without a result an error, so that none gets one later."""
        number = 0
        async for part in self._store.parts(record.input_file_id, record.parts):
            raw = lines_of(part)
            await asyncio.gather(*(self._seal_line(record, number + place, line) for place, line in enumerate(raw)))
            number += len(raw)

    async def _seal_line(self, record: BatchRecord, number: int, raw: bytes) -> None:
        line = parse_line(
            raw, endpoint=record.endpoint, models=[record.model] if record.model else self._models_of(record.endpoint)
        )
        code = record.seal
        entry = unanswered(record.id, number, line.custom_id, code=code, message=SEALS[code])
        await self._streams.create(subjects.batch_result(record.id, number), encode(Result(entry=entry, failed=True)))

    async def _files(self, record: BatchRecord) -> tuple[FileRecord | None, FileRecord | None]:
        """Write the output and the error file. Repeating it writes the same files."""
        packers = {kind: Packer() for kind in ("output", "error")}
        parts = dict.fromkeys(packers, 0)

        async def keep(kind: str, part: bytes | None) -> None:
            if part is not None:
                await self._streams.create(subjects.batch_part(_file_id(record, kind), parts[kind]), part)
                parts[kind] += 1

        async for stored in self._streams.scan(subjects.batch_result(record.id, "*")):
            result = result_decoder.decode(stored.data)
            kind = "error" if result.failed else "output"
            await keep(kind, packers[kind].add(result.entry))
        found = sum(packer.lines for packer in packers.values())
        if found != record.total:
            raise UnavailableError(f"{found} of {record.total} results of {record.id} are to be read now")
        for kind, packer in packers.items():
            await keep(kind, packer.rest())
        return (
            await self._file(record, "output", packers["output"], parts["output"]),
            await self._file(record, "error", packers["error"], parts["error"]),
        )

    async def _file(self, record: BatchRecord, kind: str, packer: Packer, parts: int) -> FileRecord | None:
        if not packer.lines:
            return None
        file = FileRecord(
            id=_file_id(record, kind),
            tenant=record.tenant,
            filename=f"{record.id}_{kind}.jsonl",
            purpose="batch_output",
            parts=parts,
        )
        return await keep_record(self._streams, file, packer, keep_s=self._store.limits.keep_s)

    async def _clear(self, record: BatchRecord) -> None:
        await self._streams.purge(subjects.batch_line(record.id, "*"), work=True)
        for subject in (subjects.batch_result, subjects.batch_failure, subjects.batch_start):
            await self._streams.purge(subject(record.id, "*"))


def _failed(record: BatchRecord, *errors: LineError) -> BatchRecord:
    return record.to("failed", time.time(), errors=list(errors))


def _file_id(record: BatchRecord, kind: str) -> str:
    """A file id that is the same for every attempt, and unguessable without the batch's id."""
    return f"file-{hashlib.sha256(f'{record.id} {kind}'.encode()).hexdigest()[:32]}"
