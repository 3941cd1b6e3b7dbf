"""The speaker of a message: the name in its subject, to which NATS' permissions bind the sender.

A message that names somebody else, or contradicts itself, is forged: counted and dropped.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from common.messages import (
    Cancel,
    Dial,
    Frame,
    GatewayState,
    PlannerState,
    Received,
    Resend,
    Reserve,
    WorkerMessage,
    WorkerState,
)
from common.subjects import is_id

# Kind of subject -> index of the speaker's name. `baton.planner` and the like without a name are release 0.1.0's.
_PLACES = {"heartbeat": 2, "gatebeat": 2, "planner": 2, "gateway": 3, "frames": 3, "peer": 3, "order": 3, "plan": 3}


@lru_cache(maxsize=1024)
def speaker_of(subject: str) -> str:
    """The speaker's name in the subject; "" on a subject without one."""
    parts = subject.split(".")
    place = _PLACES.get(parts[1], len(parts)) if len(parts) > 1 else len(parts)
    return parts[place] if place < len(parts) else ""


def claimed_by(message: msgspec.Struct) -> str | None:
    """The speaker's name in the message's own fields; None if it has none."""
    match message:
        case WorkerMessage() | Dial() | Frame() | Reserve() | WorkerState():
            return message.worker
        case GatewayState():
            return message.gateway
        case PlannerState():
            return message.planner
        case Resend():
            return message.worker or None
        case Cancel() | Received():
            return getattr(message, "worker", "") or message.gateway or None
    return None


def contradiction(subject: str, message: msgspec.Struct) -> str:
    """Return the fact on which the subject and the message disagree; "" if none."""
    speaker, claimed = speaker_of(subject), claimed_by(message)
    if speaker and claimed is not None and claimed != speaker:
        return f"{speaker} speaks as {claimed[:64]!r}"
    if claimed is not None and not is_id(claimed):
        return f"{claimed[:64]!r} is no id"
    if isinstance(message, WorkerState) and message.region.incarnation != message.incarnation:
        return "its region is another incarnation's"
    if speaker and isinstance(message, Cancel | Received):
        is_told = message.gateway if subject.startswith("baton.order.") else getattr(message, "worker", "")
        return "" if is_told else f"{speaker} ends a request without its name"
    return ""
