"""Files and batches of tenants. Subjects carry the tenant's digest, so a tenant finds only its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from common import subjects
from common.errors import InvalidRequestError, OverloadedError, UnavailableError
from common.wire import Wire
from gateway.batches.lines import LineCutter, Packer, lines_of
from gateway.batches.records import (
    BatchLimits,
    BatchRecord,
    FileRecord,
    batch_decoder,
    encode,
    file_decoder,
    first_step,
    is_id,
    new_batch_id,
    new_file_id,
)
from gateway.http.problem import ConflictError, NotKeptError
from gateway.keeping.changing import changed
from gateway.keeping.layout import Layout, StoreFullError, token_of
from gateway.keeping.streams import KeptStreams, Stored

log = logging.getLogger("baton.batches")

SLICE_BYTES = 8 << 10  # bytes a loop turn: a line may be one byte
MAX_CACHED_PARTS = 8  # each half a megabyte, or one line
UPLOADS_SHARE = 0.7  # share of the store; the rest is for results
TURN_TIMEOUT_S = 10.0  # wait for the tenant's other batches to be created
REMEDY = "delete files"
R = TypeVar("R", FileRecord, BatchRecord)


def batch_streams(wire: Wire, limits: BatchLimits) -> KeptStreams:
    """The streams of files, batches and results, and the work queue of lines and steps."""
    layout = Layout(
        what="batches",
        kept=subjects.BATCH_STREAM,
        work=subjects.BATCH_WORK_STREAM,
        kinds=("line", "step"),
        store_bytes=limits.store_bytes,
        keep_s=limits.keep_s,
        remedy=REMEDY,
    )
    return KeptStreams(wire, layout)


class FileWriter:
    """A file being uploaded: parts are stored as they arrive; the record, written last, completes it."""

    def __init__(self, store: BatchStore, tenant: str, room: int) -> None:
        """`room`: the store's size limit in bytes."""
        self.id = new_file_id()
        self._store = store
        self._streams = store.streams
        self._tenant = tenant
        self._room = room
        limits = store.limits
        self._cutter = LineCutter(
            file_bytes=limits.file_bytes, file_lines=limits.file_lines, line_bytes=limits.line_bytes
        )
        self._parts = 0

    async def write(self, data: bytes) -> None:
        """Write more. Raises InvalidRequestError or StoreFullError beyond a limit."""
        for start in range(0, len(data), SLICE_BYTES):
            for part in self._cutter.feed(data[start : start + SLICE_BYTES]):
                await self._keep(part)
            await asyncio.sleep(0)

    async def finish(self, filename: str) -> FileRecord:
        """Complete the file; it is acknowledged when this returns. Raises InvalidRequestError and StoreFullError."""
        for part in self._cutter.finish():
            await self._keep(part)
        await self._store.tenant_room(self._tenant, self._cutter.bytes)  # others may have been completed meanwhile
        file = FileRecord(id=self.id, tenant=self._tenant, filename=filename, parts=self._parts)
        return await keep_record(self._streams, file, self._cutter, keep_s=self._store.limits.keep_s)

    async def drop(self) -> None:
        """Remove what was stored, with the record: its acknowledgement may have been lost."""
        await self._streams.purge(subjects.batch_file(token_of(self._tenant), self.id))
        await self._streams.purge(subjects.batch_part(self.id, "*"))

    async def _keep(self, part: bytes) -> None:
        if self._cutter.bytes > self._room:
            raise _full(f"{self._room} bytes are left")
        await self._streams.create(subjects.batch_part(self.id, self._parts), part)
        self._parts += 1


async def keep_record(
    streams: KeptStreams, file: FileRecord, content: LineCutter | Packer, *, keep_s: float
) -> FileRecord:
    """Write the record that completes a file, unless there is one; return it."""
    now = int(time.time())
    size = {"bytes": content.bytes, "lines": content.lines}
    record = msgspec.structs.replace(file, **size, created_at=now, expires_at=now + int(keep_s))
    await streams.create(record.subject, encode(record))
    return record


class BatchStore:
    """The files and batches of all tenants."""

    def __init__(self, streams: KeptStreams, limits: BatchLimits) -> None:
        self.streams = streams
        self.limits = limits
        self._read: dict[tuple[str, int], list[bytes]] = {}  # recently read parts as lines
        self._reading = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = {}  # one a configured tenant

    # -- files -------------------------------------------------------------------------------------------------------

    async def new_file(self, tenant: str, announced_bytes: int) -> FileWriter:
        """Start a file. Raises OverloadedError if the tenant has no room for one."""
        spare = int(UPLOADS_SHARE * self.limits.store_bytes) - await self.streams.used_bytes()
        if announced_bytes > spare:
            raise _full("files leave room for results")
        return FileWriter(self, tenant, min(spare, await self.tenant_room(tenant, announced_bytes)))

    async def tenant_room(self, tenant: str, num_bytes: int) -> int:
        """Bytes that a tenant may still store. Raises StoreFullError for `num_bytes`, or one file, too many."""
        files = await self.files(tenant)
        room = int(self.limits.store_bytes * self.limits.tenant_share) - sum(file.bytes for file in files)
        if len(files) >= self.limits.tenant_files:
            raise _full(f"{len(files)} files of this API key")
        if num_bytes > room or room <= 0:
            raise _full(f"{max(0, room)} bytes are left for this API key")
        return room

    async def files(self, tenant: str) -> list[FileRecord]:
        """A tenant's files, oldest first."""
        subject = subjects.batch_file(token_of(tenant), "*")
        return [file async for stored in self.streams.scan(subject) for file in _read(file_decoder, stored)]

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises NotKeptError."""
        stored = await self.streams.get(subjects.batch_file(token_of(tenant), file_id)) if is_id(file_id) else None
        if stored is None:
            raise NotKeptError(f"no file {file_id[:100]!r}: it was deleted, has expired, or never was", param="file_id")
        return file_decoder.decode(stored.data)

    async def parts(self, file_id: str, count: int) -> AsyncGenerator[bytes, None]:
        """Read the parts. Raises NotKeptError if one is gone."""
        for number in range(count):
            yield await self.part(file_id, number)

    async def part(self, file_id: str, number: int) -> bytes:
        """Raises NotKeptError."""
        stored = await self.streams.get(subjects.batch_part(file_id, number))
        if stored is None:
            raise NotKeptError(f"the file {file_id} was deleted or has expired", param="file_id")
        return stored.data

    async def line(self, file_id: str, part: int, place: int) -> bytes:
        """A line of a part; a few parts are cached. Raises NotKeptError."""
        async with self._reading:
            lines = self._read.pop((file_id, part), None)
            if lines is None:
                lines = lines_of(await self.part(file_id, part))
            while len(self._read) >= MAX_CACHED_PARTS:
                del self._read[next(iter(self._read))]
            self._read[file_id, part] = lines
        return lines[place]

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotKeptError, or ConflictError while a batch needs it."""
        record = await self.file(tenant, file_id)
        for batch in await self.batches(tenant):
            if batch.input_file_id == file_id and not batch.is_over:
                raise ConflictError(f"batch {batch.id} is {batch.status} and reads this file: cancel it first")
        await self.streams.purge(subjects.batch_part(file_id, "*"))  # deletion can be repeated
        await self.streams.purge(record.subject)

    # -- batches -----------------------------------------------------------------------------------------------------

    async def new_batch(
        self, tenant: str, *, input_file_id: str, endpoint: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """Create a batch; when this returns, it is acknowledged and will be processed."""
        file, now = await self.file(tenant, input_file_id), int(time.time())
        if file.purpose != "batch":
            raise InvalidRequestError(f"a file of purpose {file.purpose} is no input", param="input_file_id")
        if file.expires_at < now + self.limits.window_s:
            raise InvalidRequestError("the file expires before the batch would: upload it again", param="input_file_id")
        record = BatchRecord(
            id=new_batch_id(),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            metadata=metadata,
            created_at=now,
            expires_at=now + int(self.limits.window_s),
            parts=file.parts,
        )
        async with self._turn(tenant):
            await self._check_batches(tenant)
            await self._begin(record)
        return record

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """Serialise a tenant's new batches: concurrently, each would find room for one more."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await turn.acquire()
        except TimeoutError:
            raise OverloadedError("many batches of this API key begin here: try again later") from None
        try:
            yield
        finally:
            turn.release()

    async def _check_batches(self, tenant: str) -> None:
        kept = await self.batches(tenant)
        running = sum(not batch.is_over for batch in kept)
        if running >= self.limits.tenant_batches:
            raise OverloadedError(f"{running} batches of this API key are not over, the limit: try again later")
        if len(kept) >= self.limits.tenant_kept_batches:
            raise OverloadedError(
                f"{len(kept)} batches of this API key are kept, the limit: put more lines into one, or wait until old ones expire"
            )

    async def _begin(self, record: BatchRecord) -> None:
        # The step is queued first: without a batch it is dropped, but a batch without a step would never end.
        await self.streams.enqueue(subjects.batch_step(record.id), encode(first_step(record)))
        await self.streams.create(record.subject, encode(record))

    async def batches(self, tenant: str) -> list[BatchRecord]:
        """A tenant's files, oldest first."""
        subject = subjects.batch_record(token_of(tenant), "*")
        found: dict[str, BatchRecord] = {}  # a batch that changes meanwhile is read twice
        async for stored in self.streams.scan(subject):
            for batch in _read(batch_decoder, stored):
                found[stored.subject] = batch
        return sorted(found.values(), key=lambda batch: (batch.created_at, batch.id))

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises NotKeptError."""
        return (await self.load(tenant, batch_id))[0]

    async def change(self, tenant: str, batch_id: str, to: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """Apply `to` to the newest record, retrying on conflicts. Raises what `to` raises, UnavailableError."""
        return await changed(
            f"batch {batch_id}",
            partial(self.load, tenant, batch_id),
            to,
            lambda record, seq: self.streams.replace(record.subject, encode(record), seq=seq),
        )

    async def load(self, tenant: str, batch_id: str) -> tuple[BatchRecord, int]:
        """A tenant's batch, and its sequence for `KeptStreams.replace`. Raises NotKeptError."""
        stored = await self.streams.get(subjects.batch_record(token_of(tenant), batch_id)) if is_id(batch_id) else None
        if stored is None:
            raise NotKeptError(f"no batch {batch_id[:100]!r}: it has expired, or never was", param="batch_id")
        return batch_decoder.decode(stored.data), stored.seq

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Cancel a batch: no more lines are run. Raises ConflictError if it is too late."""

        def cancelling(record: BatchRecord) -> BatchRecord:
            if record.status == "cancelling":
                return record
            try:
                return record.to("cancelling", time.time(), seal="batch_cancelled")
            except ValueError:
                raise ConflictError(f"the batch is {record.status}: it can't be cancelled any more") from None

        record = await self.change(tenant, batch_id, cancelling)
        # Queue the batch's step again in case it was lost: otherwise the batch would never end.
        with contextlib.suppress(UnavailableError, OverloadedError):
            await self.streams.enqueue(subjects.batch_step(record.id), encode(first_step(record)))
        return record


def _full(told: str) -> StoreFullError:
    return StoreFullError(told, what="batches", remedy=REMEDY)


def _read(decoder: msgspec.msgpack.Decoder[R], stored: Stored) -> Iterator[R]:
    """Decode a record; None if this release can't: lists leave it out."""
    try:
        yield decoder.decode(stored.data)
    except msgspec.MsgspecError as error:
        log.warning("batches.record_unreadable", extra={"subject": stored.subject, "error": str(error)[:200]})
