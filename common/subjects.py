"""Every NATS subject, stream and Redis key, in one place.

Worker and gateway ids are tokens of `[A-Za-z0-9_-]{1,64}` (checked by `check_id`), so that an id can never widen a subject.
"""

from __future__ import annotations

import re

JOBS_STREAM = "BATON_JOBS"  # work queue, memory storage: jobs that were admitted and not yet settled
DEAD_STREAM = "BATON_DEAD"  # dead letters: jobs given up and messages that could not be decoded
BATCH_STREAM = "BATON_BATCH"  # on disk, a message a subject: files, batches and results of the Batch API
BATCH_WORK_STREAM = "BATON_BATCH_WORK"  # work queue on disk: lines to run, and batches to look after

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def check_id(name: str) -> str:
    """Return `name` if it may be part of a subject or key; raise ValueError otherwise."""
    if not _ID.match(name):
        raise ValueError(f"{name!r} is not a valid id: use 1 to 64 letters, digits, '-' or '_'")
    return name


def jobs(worker: str) -> str:
    """JetStream: gateway -> the worker that shall prefill."""
    return f"baton.jobs.{check_id(worker)}"


def worker(worker_id: str) -> str:
    """Core NATS, requests to one worker: `ToWorker` (reserve, hand-off, cancel, resend, set roles, ...)."""
    return f"baton.worker.{check_id(worker_id)}"


def gateway(gateway_id: str) -> str:
    """Core NATS, requests to one gateway: `ToGateway` (claim, settle, failed, imported)."""
    return f"baton.gateway.{check_id(gateway_id)}"


def frames(gateway_id: str) -> str:
    """Core NATS: token frames to one gateway, one a step and worker."""
    return f"baton.frames.{check_id(gateway_id)}"


def heartbeat(worker_id: str) -> str:
    """Core NATS: one worker's `WorkerState`, every 500 ms."""
    return f"baton.heartbeat.{check_id(worker_id)}"


ALL_HEARTBEATS = "baton.heartbeat.*"


def gateway_heartbeat(gateway_id: str) -> str:
    """Core NATS: one gateway's `GatewayState`, every second."""
    return f"baton.gatebeat.{check_id(gateway_id)}"


def console(gateway_id: str) -> str:
    """Core NATS, requests to one gateway: what another one's console shows of it (`gateway.console.messages`)."""
    return f"baton.console.{check_id(gateway_id)}"


ALL_GATEWAY_HEARTBEATS = "baton.gatebeat.*"


PLANNER = "baton.planner"  # Core NATS: `PlannerState`, with each decision


def dead_letter(kind: str) -> str:
    """JetStream: what was given up; `kind` is `job` or `malformed`."""
    return f"baton.dead.{check_id(kind)}"


def batch_file(tenant: str, file: str) -> str:
    """JetStream, like all of these: what a file is. `tenant` is its digest."""
    return f"baton.batch.file.{tenant}.{file}"


def batch_part(file: str, part: int | str) -> str:
    """A run of whole lines of a file."""
    return f"baton.batch.part.{file}.{part}"


def batch_record(tenant: str, batch: str) -> str:
    """What a batch is, and how far."""
    return f"baton.batch.record.{tenant}.{batch}"


def batch_result(batch: str, line: int | str) -> str:
    """What became of a line; written once."""
    return f"baton.batch.result.{batch}.{line}"


def batch_failure(batch: str, line: int | str) -> str:
    """Marks a result that is an error, so that they can be counted."""
    return f"baton.batch.failure.{batch}.{line}"


def batch_start(batch: str, line: int | str) -> str:
    """How often a line was begun and its gateway did not live to end it."""
    return f"baton.batch.start.{batch}.{line}"


def batch_line(batch: str, line: int | str) -> str:
    """Work queue: a line to run."""
    return f"baton.batchwork.line.{batch}.{line}"


def batch_step(batch: str) -> str:
    """Work queue: a batch that is not over; it comes again until it is."""
    return f"baton.batchwork.step.{batch}"
