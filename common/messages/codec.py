"""Encode messages, and decode them: one union and one decoder for each receiver."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from common.errors import ForeignVersionError, MalformedMessageError
from common.messages.base import MAX_PROTOCOL_VERSION, MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from common.messages.control import Ack, Drain, RolesReply, SetRoles, Unload
from common.messages.frames import Cancel, Frame, Received, Resend
from common.messages.handoff import (
    Dial,
    DialReply,
    Handoff,
    HandoffReply,
    Imported,
    LeaseAborted,
    Reserve,
    ReserveAgain,
    ReserveReply,
    WriterDone,
)
from common.messages.jobs import Claim, ClaimReply, Failed, Job, Settle, SettleReply, Trying
from common.messages.pooling import Pool, Pooled
from common.messages.pulls import PullBlocks, PullReply, StopPull
from common.messages.states import GatewayState, HostState, PlannerState, WorkerState

FromPeer = Dial | Reserve | ReserveAgain | Handoff | WriterDone | LeaseAborted | Cancel | Resend | PullBlocks | StopPull
FromGateway = Cancel | Resend | Received | SetRoles | Drain
ToWorker = FromPeer | FromGateway
ToGateway = Claim | Settle | Failed | Imported | Trying
WorkerReply = DialReply | ReserveReply | HandoffReply | RolesReply | PullReply | Ack
GatewayReply = ClaimReply | SettleReply | Ack

to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_peer_decoder: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
from_gateway_decoder: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
from_planner_decoder: msgspec.msgpack.Decoder[SetRoles] = msgspec.msgpack.Decoder(SetRoles)
to_gateway_decoder: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
worker_reply_decoder: msgspec.msgpack.Decoder[WorkerReply] = msgspec.msgpack.Decoder(WorkerReply)
gateway_reply_decoder: msgspec.msgpack.Decoder[GatewayReply] = msgspec.msgpack.Decoder(GatewayReply)
frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
job_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
worker_state_decoder: msgspec.msgpack.Decoder[WorkerState] = msgspec.msgpack.Decoder(WorkerState)
planner_state_decoder: msgspec.msgpack.Decoder[PlannerState] = msgspec.msgpack.Decoder(PlannerState)
host_state_decoder: msgspec.msgpack.Decoder[HostState] = msgspec.msgpack.Decoder(HostState)
to_host_decoder: msgspec.msgpack.Decoder[Unload] = msgspec.msgpack.Decoder(Unload)
host_reply_decoder: msgspec.msgpack.Decoder[Ack] = msgspec.msgpack.Decoder(Ack)
pool_decoder: msgspec.msgpack.Decoder[Pool | FromGateway] = msgspec.msgpack.Decoder(Pool | FromGateway)
pooled_decoder: msgspec.msgpack.Decoder[Pooled | Ack] = msgspec.msgpack.Decoder(Pooled | Ack)
gateway_state_decoder: msgspec.msgpack.Decoder[GatewayState] = msgspec.msgpack.Decoder(GatewayState)

_encoder = msgspec.msgpack.Encoder()
Message = TypeVar("Message")


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[Message], raw: bytes) -> Message:
    """Decode and check the version. Raises MalformedMessageError with the path of what is wrong, or ForeignVersionError."""
    try:
        message = decoder.decode(raw)
    except _UNREADABLE as error:
        with contextlib.suppress(*_UNREADABLE):
            _check(_version_decoder.decode(raw).v)  # a foreign version explains why it is unreadable
        raise MalformedMessageError(str(error)) from error
    _check(getattr(message, "v", PROTOCOL_VERSION))
    return message


class _Version(msgspec.Struct):
    v: int = PROTOCOL_VERSION


_version_decoder = msgspec.msgpack.Decoder(_Version)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # bad text, deep nesting


def _check(version: int) -> None:
    if not MIN_PROTOCOL_VERSION <= version <= MAX_PROTOCOL_VERSION:
        ours = f"this process works beside {MIN_PROTOCOL_VERSION} to {MAX_PROTOCOL_VERSION}"
        raise ForeignVersionError(f"protocol version {version}: {ours}; upgrade one release at a time")
