"""Orders of a planner or an operator to a worker or a host, and plain answers."""

from __future__ import annotations

import msgspec

from common.messages.base import PROTOCOL_VERSION
from common.words import Role


class SetRoles(msgspec.Struct, frozen=True, kw_only=True, tag="set_roles"):
    """Planner or operator -> worker, request: take new work of these roles alone. Answered by `RolesReply`. Idempotent.

    Work that a lost role has begun runs to its end; the rest goes back to its gateway.
    """

    v: int = PROTOCOL_VERSION
    roles: list[str]  # not Role: the reply names unknown ones
    reason: str = ""  # shown in the worker's log


class RolesReply(msgspec.Struct, frozen=True, kw_only=True, tag="roles_reply"):
    """Accepted: `roles` take new work from now on. Otherwise nothing changed, and `reason` says why."""

    accepted: bool
    roles: list[Role]
    reason: str = ""


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Operator -> worker, request: take no new work, or (`draining` false) take it again.

    Answered by `RolesReply`. Idempotent. Running work goes on to its end, waiting work goes back to its gateway, the roles stay.
    """

    v: int = PROTOCOL_VERSION
    draining: bool = True
    reason: str = ""  # shown in the worker's log


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """Gateway -> host, request: unload a model once no requests wait for it or run. Answered by `Ack`. Idempotent."""

    v: int = PROTOCOL_VERSION
    model: str
    parks: bool = False  # rather put it to sleep, if its host can


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """Plain answer. `known` is False when the receiver had nothing to do for this id."""

    known: bool
    waits: bool = False  # the request waits here until a decode worker has room
