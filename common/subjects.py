"""Every NATS subject and stream, in one place. Redis keys are named in the Lua functions.

Worker and gateway ids match `[A-Za-z0-9_-]{1,64}` (`check_id`), so an id can never widen a subject. A subject's last name is the
speaker's, to which NATS' permissions bind it. Release 0.1.0 speaks on subjects without one.
"""

from __future__ import annotations

import re
from functools import lru_cache

JOBS_STREAM = "BATON_JOBS"  # work queue in memory: jobs admitted and not yet settled
DEAD_STREAM = "BATON_DEAD"  # dead letters: abandoned jobs and unreadable messages
BATCH_STREAM = "BATON_BATCH"  # Batch API on disk: files, batches, results, one message a subject
BATCH_WORK_STREAM = "BATON_BATCH_WORK"  # work queue on disk: lines to run, and batches to look after
RESPONSES_STREAM = "BATON_RESPONSES"  # Responses API on disk: responses, events, conversations, a message a subject
RESPONSES_WORK_STREAM = "BATON_RESPONSES_WORK"  # work queue on disk: responses to make in the background
KEYS_STREAM = "BATON_KEYS"  # on disk: keys made at run time, one message
USAGE_STREAM = "BATON_USAGE"  # on disk: what each key used, by day and gateway


def root_of(stream: str) -> str:
    """Return the subject prefix of a stored stream or its work queue: `baton.batchwork` for BATON_BATCH_WORK."""
    first, *rest = stream.lower().split("_")
    return f"{first}.{''.join(rest)}"


_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def is_id(name: str) -> bool:
    """True if `name` may be part of a subject or key."""
    return _ID.match(name) is not None


def check_id(name: str) -> str:
    """Return `name` if it may be part of a subject or key; raise ValueError otherwise."""
    if not is_id(name):
        raise ValueError(f"{name!r} is not a valid id: use 1 to 64 letters, digits, '-' or '_'")
    return name


def jobs(worker: str) -> str:
    """JetStream: gateway -> the chosen prefill worker."""
    return f"baton.jobs.{check_id(worker)}"


ANY = "*"  # every speaker, to subscribe


def worker(worker_id: str) -> str:
    """Core NATS, requests to one worker from processes of release 0.1.0: `ToWorker`."""
    return f"baton.worker.{check_id(worker_id)}"


def peer(worker_id: str, speaker: str) -> str:
    """Core NATS, requests to one worker from another one: `FromPeer` (reserve, handoff, ...)."""
    return f"baton.peer.{check_id(worker_id)}.{_speaker(speaker)}"


def order(worker_id: str, speaker: str) -> str:
    """Core NATS, requests to one worker from a gateway: `FromGateway` (cancel, resend, set roles, ...)."""
    return f"baton.order.{check_id(worker_id)}.{_speaker(speaker)}"


def plan(worker_id: str, speaker: str) -> str:
    """Core NATS, requests to one worker from a planner: `SetRoles`."""
    return f"baton.plan.{check_id(worker_id)}.{_speaker(speaker)}"


def gateway(gateway_id: str, speaker: str = "") -> str:
    """Core NATS, requests to one gateway: `ToGateway` (claim, settle, failed, imported). Without a speaker: release 0.1.0's."""
    return f"baton.gateway.{check_id(gateway_id)}" + (f".{_speaker(speaker)}" if speaker else "")


def frames(gateway_id: str, speaker: str = "") -> str:
    """Core NATS: token frames to one gateway, one a step and worker."""
    return f"baton.frames.{check_id(gateway_id)}" + (f".{_speaker(speaker)}" if speaker else "")


def heartbeat(worker_id: str) -> str:
    """Core NATS: one worker's `WorkerState`, every 500 ms."""
    return f"baton.heartbeat.{check_id(worker_id)}"


ALL_HEARTBEATS = "baton.heartbeat.*"


def gateway_heartbeat(gateway_id: str) -> str:
    """Core NATS: one gateway's `GatewayState`, every second."""
    return f"baton.gatebeat.{check_id(gateway_id)}"


def console(gateway_id: str) -> str:
    """Core NATS, requests to one gateway from another one's console (`gateway.console.messages`)."""
    return f"baton.console.{check_id(gateway_id)}"


ALL_GATEWAY_HEARTBEATS = "baton.gatebeat.*"


PLANNER = "baton.planner"  # Core NATS: `PlannerState`, with each decision; release 0.1.0 reads only this one


def planner(planner_id: str) -> str:
    """Core NATS: one planner's `PlannerState`."""
    return f"{PLANNER}.{_speaker(planner_id)}"


def host(host_id: str, speaker: str) -> str:
    """Core NATS, requests to one host from a gateway: `Unload`."""
    return f"baton.host.{check_id(host_id)}.{_speaker(speaker)}"


def host_heartbeat(host_id: str) -> str:
    """Core NATS: one host's `HostState`."""
    return f"baton.hostbeat.{_speaker(host_id)}"


def dead_letter(kind: str) -> str:
    """JetStream: abandoned work; `kind` is `job` or `malformed`."""
    return f"baton.dead.{check_id(kind)}"


def batch_file(tenant: str, file: str) -> str:
    """JetStream, like all below: a file's metadata. `tenant` is its digest."""
    return f"baton.batch.file.{tenant}.{file}"


def batch_part(file: str, part: int | str) -> str:
    """A run of whole lines of a file."""
    return f"baton.batch.part.{file}.{part}"


def batch_record(tenant: str, batch: str) -> str:
    """A batch's description and progress."""
    return f"baton.batch.record.{tenant}.{batch}"


def batch_result(batch: str, line: int | str) -> str:
    """A line's result; written once."""
    return f"baton.batch.result.{batch}.{line}"


def batch_failure(batch: str, line: int | str) -> str:
    """Marks a result that is an error, to count them."""
    return f"baton.batch.failure.{batch}.{line}"


def batch_start(batch: str, line: int | str) -> str:
    """Count of a line's starts whose gateway died."""
    return f"baton.batch.start.{batch}.{line}"


def batch_line(batch: str, line: int | str) -> str:
    """Work queue: a line to run."""
    return f"baton.batchwork.line.{batch}.{line}"


def batch_step(batch: str) -> str:
    """Work queue: an unfinished batch; redelivered until it is done."""
    return f"baton.batchwork.step.{batch}"


def kept_response(tenant: str, response: str, *names: str | int) -> str:
    """A response's record, content or events; with `>` all of them."""
    return f"baton.responses.{tenant}.response.{response}.{'.'.join(map(str, names))}"


def kept_conversation(tenant: str, conversation: str, *names: str | int) -> str:
    """A conversation's record, or a turn of it."""
    return f"baton.responses.{tenant}.conversation.{conversation}.{'.'.join(map(str, names))}"


def response_run(tenant: str, response: str) -> str:
    """Work queue: a response to make in the background."""
    return f"baton.responseswork.run.{tenant}.{response}"


KEYS = "baton.keys.register"  # JetStream: `gateway.tenants.register.Register`


def usage(day: int | str, gateway_id: str, incarnation: int | str) -> str:
    """JetStream: what each key used at a gateway on a day since 1970 (`gateway.tenants.usage.UsageRecord`)."""
    return f"baton.usage.{day}.{_speaker(gateway_id)}.{incarnation}"


# Kind of subject -> index of the speaker's name. `baton.planner` and the like without a name are release 0.1.0's.
_PLACES = dict.fromkeys(("heartbeat", "gatebeat", "planner", "hostbeat"), 2)
_PLACES |= dict.fromkeys(("gateway", "frames", "peer", "order", "plan", "host"), 3)


@lru_cache(maxsize=1024)
def speaker_of(subject: str) -> str:
    """The speaker's name in the subject; "" on a subject without one."""
    parts = subject.split(".")
    place = _PLACES.get(parts[1], len(parts)) if len(parts) > 1 else len(parts)
    return parts[place] if place < len(parts) else ""


def _speaker(name: str) -> str:
    return name if name == ANY else check_id(name)
