"""Permissions on NATS and Redis: one user a process, with its role's permissions only.

A process's user can't read another's messages: not a gateway's frames, and no answers. Where ids are not known beforehand
(replicas), one user stands for every process of its role (`id` "*").
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from common import subjects
from common.access import Login, inbox_of, write_secret

Role = Literal["gateway", "prefill", "decode", "worker", "pool", "planner", "host", "observer", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
WORKERS: tuple[Role, ...] = ("prefill", "decode", "worker")
EVERY_ID = "*"


@dataclass(frozen=True, slots=True)
class Member:
    """A process that may connect; `id` "*" stands for every process of a role."""

    role: Role
    id: str = EVERY_ID

    @property
    def user(self) -> str:
        return self.role if self.id == EVERY_ID else subjects.check_id(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Subjects that a NATS user may publish and subscribe to. Replies to its own requests are always allowed."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def nats_permissions(member: Member) -> Permissions:
    """A member's permissions on NATS. Add every new subject here."""
    inbox = f"{inbox_of(member.user)}.>"
    if member.role == "admin":
        return Permissions(publish=(">",), subscribe=(">",))
    if member.role == "gateway":
        return _gateway(member.id, inbox)
    if member.role in WORKERS:
        return _worker(member.id, inbox)
    if member.role == "pool":
        return _pool(member.id, inbox)
    heartbeats = (subjects.ALL_HEARTBEATS, subjects.ALL_GATEWAY_HEARTBEATS)
    if member.role == "planner":
        own = subjects.planner(member.id)
        return Permissions(
            publish=("baton.worker.*", f"baton.plan.*.{member.id}", subjects.PLANNER, own),
            subscribe=(inbox, *heartbeats, subjects.PLANNER, subjects.planner(subjects.ANY)),
        )
    if member.role == "host":
        return Permissions(
            publish=(subjects.host_heartbeat(member.id),),
            subscribe=(
                inbox,
                *heartbeats,
                f"baton.host.{member.id}.*",
                subjects.host_heartbeat(subjects.ANY),
                subjects.planner(subjects.ANY),  # its counts of workers
            ),
        )
    return Permissions(publish=("$JS.API.INFO",), subscribe=(inbox, *heartbeats, subjects.PLANNER))


def redis_rules(member: Member, *, beside_0_1_0: bool = False) -> str:
    """A member's permissions on Redis as ACL rules: functions by name, and the keys and commands inside them.

    Redis checks the commands of a function against the user that calls it, so a function gives nobody more than this.
    `beside_0_1_0`: workers may also do what that release's do, which is far more.
    """
    if member.role == "admin":
        return "~* &* +@all"
    if member.role == "gateway":
        names = (
            "worker:* workers block:* charges:* load:* placed:* ready:* home:* rate:* told:* news:* budget:* running:* "
        )
        keys = " ".join(f"~baton:{name}" for name in (names + "leased:* reserved:* incumbents:*").split())
        functions = [f"baton4_{name}" for name in ("enter", "leave", "news", "place", "release", "charged")]
        functions += [f"baton2_budget_{name}" for name in ("take", "settle", "left", "renew")]
        functions += [
            f"baton3_{name}" for name in ("place", "release", "charged", "states")
        ]  # 0.1.0's, and the later ones
        functions += [f"baton_budget_{name}" for name in ("take", "settle", "left")]
        commands = (
            "+function|load +time +get +set +del +incrby +decrby +expire +pexpire +hget +hmget +hset +hdel +smembers +srem "
            "+smismember +srandmember +scard +exists +zadd +zcard +zrange +zrangebyscore +zrem +zremrangebyscore "
            "+getrange +pttl +sadd +zcount +zscore"
        )
    elif member.role in WORKERS:
        keys, functions, commands = f"%R~baton:told:{member.id} %W~baton:news:{member.id}", [], "+get +set"
        if beside_0_1_0:
            return f"{_rules(keys, functions, commands)} ({_worker_of_0_1_0(member.id)})"
    else:
        keys, functions, commands = "", [], "+info" if member.role == "observer" else ""
    return _rules(keys, functions, commands)


def _rules(keys: str, functions: Sequence[str], commands: str) -> str:
    calls = " ".join(f"+fcall|{name}" for name in functions)
    return " ".join(f"resetchannels {keys} -@all +ping {calls} {commands}".split())


def _worker_of_0_1_0(own: str) -> str:
    """An ACL selector: workers of that release registered themselves in keys that all workers share."""
    keys = f"~baton:worker:{own} ~baton:workers ~baton:block:* ~baton:charges:*:{own} ~baton:load:*:{own} "
    keys += f"~baton:ready:* ~baton:home:{own} ~baton:rate:*"
    calls = " ".join(f"+fcall|baton3_{name}" for name in ("register", "unregister", "announce"))
    commands = "+time +get +set +hget +hmget +hset +hdel +del +exists +pexpire +expire +sadd +srem "
    return f"{keys} {calls} {commands}+decrby +zadd +zcard +zrem +zrangebyscore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """A deployment's users: the servers' configuration, and a folder with a `user:password` file for each."""

    folder: Path
    nats: str = field(repr=False)  # a fragment of nats-server's configuration
    redis: str = field(repr=False)  # an ACL file
    admin_nats: Login
    admin_redis: Login

    def nats_file(self, user: str) -> Path:
        return self.folder / f"{user}.nats"

    def redis_file(self, user: str) -> Path:
        return self.folder / f"{user}.redis"


def make_users(members: Sequence[Member], folder: Path, *, beside_0_1_0: bool = False) -> Users:
    """Generate a password for each member and an admin on each server; write them to files of mode 0600 in `folder`.

    `beside_0_1_0`: see `redis_rules`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    everybody = [*members, Member("admin")]
    nats = [(member, make_login(member.user)) for member in everybody]
    redis = [(member, make_login(member.user)) for member in everybody]
    users = Users(
        folder=folder,
        nats=nats_users(nats),
        redis=redis_users(redis, beside_0_1_0=beside_0_1_0),
        admin_nats=nats[-1][1],
        admin_redis=redis[-1][1],
    )
    for logins, file in ((nats, users.nats_file), (redis, users.redis_file)):
        for _, login in logins:
            write_secret(file(login.user), f"{login.user}:{login.password}\n")
    return users


def nats_users(logins: Sequence[tuple[Member, Login]]) -> str:
    """The `authorization` block of nats-server's configuration."""
    users = "".join(_nats_user(login, nats_permissions(member)) for member, login in logins)
    return f"authorization {{\n  timeout: 5\n  users: [\n{users}  ]\n}}\n"


def redis_users(logins: Sequence[tuple[Member, Login]], *, beside_0_1_0: bool = False) -> str:
    """Redis's ACL file, with passwords as SHA-256. Users without a password are refused."""
    lines = ["user default off"]
    for member, login in logins:
        lines.append(f"user {login.user} on {_hashed(login)} {redis_rules(member, beside_0_1_0=beside_0_1_0)}")
    return "\n".join(lines) + "\n"


def make_login(user: str) -> Login:
    """Generate a login with a 256-bit password."""
    return Login(user, secrets.token_urlsafe(32))


def _gateway(gateway: str, inbox: str) -> Permissions:
    jobs, dead, api = subjects.JOBS_STREAM, subjects.DEAD_STREAM, "$JS.API.STREAM"
    return Permissions(
        publish=(
            "baton.jobs.*",
            "baton.worker.*",  # release 0.1.0's
            f"baton.order.*.{gateway}",
            f"baton.gatebeat.{gateway}",
            "baton.console.*",  # other gateways' requests, for the console
            f"baton.host.*.{gateway}",
            "baton.dead.*",
            *(f"{api}.{verb}.{stream}" for verb in ("CREATE", "UPDATE") for stream in (jobs, dead)),
            # Bury jobs that were delivered too often; delete cancelled ones.
            *(f"{api}.MSG.{verb}.{jobs}" for verb in ("GET", "DELETE")),
            *_BATCHES,
            *_RESPONSES,
            *_KEYS,
            subjects.usage(subjects.ANY, gateway, subjects.ANY),
        ),
        subscribe=(
            inbox,
            f"baton.gateway.{gateway}",
            f"baton.frames.{gateway}",
            f"baton.gateway.{gateway}.*",
            f"baton.frames.{gateway}.*",
            f"baton.console.{gateway}",
            subjects.ALL_HEARTBEATS,
            subjects.ALL_GATEWAY_HEARTBEATS,  # admission counts other gateways' prompts
            subjects.PLANNER,  # the console shows its decisions
            subjects.host_heartbeat(subjects.ANY),
            subjects.kept_response("*", "*", "events", "*"),  # streams of background responses
            f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{jobs}.*",
        ),
    )


def _kept(stream: str, work: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Gateways' permissions for a durable stream and its work queue: they own both, and share the consumers."""
    root = subjects.root_of(work)
    return (
        f"{subjects.root_of(stream)}.>",
        f"{root}.>",
        *(f"$JS.API.STREAM.{verb}.{name}" for verb in ("CREATE", "UPDATE", "PURGE") for name in (stream, work)),
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        *(f"$JS.API.CONSUMER.CREATE.{work}.{kind}.{root}.{kind}.>" for kind in kinds),
        *(f"$JS.API.CONSUMER.MSG.NEXT.{work}.{kind}" for kind in kinds),
        f"$JS.ACK.{work}.>",
    )


# Only gateways use the streams of the Batch API and of kept responses.
_BATCHES = (
    *_kept(subjects.BATCH_STREAM, subjects.BATCH_WORK_STREAM, ("line", "step")),
    f"$JS.API.STREAM.INFO.{subjects.BATCH_STREAM}",  # uploads reserve room for results
)
_RESPONSES = _kept(subjects.RESPONSES_STREAM, subjects.RESPONSES_WORK_STREAM, ("run",))

# Keys made at run time, and each key's usage: any gateway may create and revoke keys, as its admins may.
_KEYS = (
    subjects.KEYS,
    *(
        f"$JS.API.STREAM.{verb}.{stream}"
        for verb in ("CREATE", "MSG.GET")
        for stream in (subjects.KEYS_STREAM, subjects.USAGE_STREAM)
    ),
)


def _worker(worker: str, inbox: str) -> Permissions:
    """Permissions of prefill and decode alike: claim jobs, exchange handoffs, send tokens."""
    jobs = subjects.JOBS_STREAM
    consumer = EVERY_ID if worker == EVERY_ID else f"worker-{worker}"
    return Permissions(
        publish=(
            # Release 0.1.0's subjects, which don't carry the speaker.
            "baton.gateway.*",
            "baton.frames.*",
            "baton.worker.*",
            f"baton.gateway.*.{worker}",
            f"baton.frames.*.{worker}",
            f"baton.peer.*.{worker}",
            f"baton.heartbeat.{worker}",
            "baton.dead.malformed",
            f"$JS.API.CONSUMER.CREATE.{jobs}.{consumer}.baton.jobs.{worker}",
            f"$JS.API.CONSUMER.MSG.NEXT.{jobs}.{consumer}",
            f"$JS.ACK.{jobs}.{consumer}.>",
        ),
        subscribe=(
            inbox,
            f"baton.worker.{worker}",
            f"baton.peer.{worker}.*",
            f"baton.order.{worker}.*",
            f"baton.plan.{worker}.*",
            subjects.ALL_HEARTBEATS,
            subjects.ALL_GATEWAY_HEARTBEATS,
        ),
    )


def _pool(worker: str, inbox: str) -> Permissions:
    """Permissions of a worker that pools: it is asked by gateways, and speaks to nobody else."""
    own = f"baton.worker.{worker}"  # who has its name
    return Permissions(
        publish=(f"baton.heartbeat.{worker}", own, "baton.dead.malformed"),
        subscribe=(inbox, own, f"baton.order.{worker}.*", f"baton.heartbeat.{worker}"),
    )


def _nats_user(login: Login, permissions: Permissions) -> str:
    """One user's entry. NATS accepts JSON strings and lists, but a password `$NAME` would be a variable of the server."""
    password = login.password if login.password.startswith("$") else json.dumps(login.password)
    return (
        f"    {{\n      user: {json.dumps(login.user)}, password: {password}\n      permissions: {{\n"
        f"        publish: {{allow: {_listed(permissions.publish)}}}\n"
        f"        subscribe: {{allow: {_listed(permissions.subscribe)}}}\n"
        '        allow_responses: {max: 1, expires: "1m"}\n'
        "      }\n    }\n"
    )


def _listed(names: Sequence[str]) -> str:
    return "[\n" + "".join(f"          {json.dumps(name)}\n" for name in names) + "        ]"


def _hashed(login: Login) -> str:
    return "#" + hashlib.sha256(login.password.encode()).hexdigest()
