"""Users and permissions against the real servers: each role can do its work and nothing more."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import nats
import nats.errors
import pytest
import pytest_asyncio
import redis.asyncio
import redis.exceptions

from common import subjects
from common.access import Login, inbox_of, read_login
from common.bus import NatsSettings, QueueLimits, connect_bus
from common.config import ConfigError
from common.errors import UnavailableError
from common.messages import Ack, Cancel, ToWorker, WorkerReply, to_worker_decoder, worker_reply_decoder
from common.servers import Server, run_nats, run_redis
from common.store import BUDGETS, LIBRARY, RedisSettings
from services.up.servers import install_library
from services.users.__main__ import members_of
from services.users.permissions import Member, Users, make_users, redis_rules
from tests.certificates import make_certificates
from tests.integration.test_bus import a_job
from tests.integration.waiting import LIMIT_S, eventually
from tests.secure_servers import run_secure_nats

ROOT = Path(__file__).resolve().parents[2]
REFUSED = r"(?i)permission|can't access"  # a function that reaches too far: Redis 7.0 has words of its own
MEMBERS = [
    Member("gateway", "gateway-0"),
    Member("gateway", "gateway-1"),
    Member("prefill", "prefill-0"),
    Member("decode", "decode-0"),
    Member("planner"),
    Member("observer"),
]


@dataclass(frozen=True)
class Deployment:
    """Both servers with users."""

    nats: Server
    redis: Server
    users: Users

    def settings(self, user: str) -> NatsSettings:
        return NatsSettings(url=self.nats.address, credentials=self.users.nats_file(user))

    def redis_as(self, user: str) -> redis.asyncio.Redis:
        login = read_login(self.users.redis_file(user))
        return redis.asyncio.Redis.from_url(
            self.redis.address, username=login.user, password=login.password, protocol=2
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    folder = tmp_path_factory.mktemp("access")
    users = make_users(MEMBERS, folder / "users")
    async with (
        run_nats(data_dir=folder / "nats", extra=users.nats) as nats_server,
        run_redis(data_dir=folder / "redis", users=users.redis) as redis_server,
    ):
        await install_library(RedisSettings(url=dataclasses.replace(redis_server, login=users.admin_redis).url))
        yield Deployment(nats_server, redis_server, users)


class Raw:
    """A plain client of one user, and the violations that the server told it of."""

    def __init__(self, client: nats.NATS, violations: list[str]) -> None:
        self.client = client
        self.violations = violations

    async def refused(self, act: Callable[[], Coroutine[object, object, object]]) -> bool:
        """Whether the server says no to this. Its word comes before the answer to the ping behind it."""
        before = len(self.violations)
        await act()
        for _ in range(2):  # the client writes its first ping before what it has in store
            await self.client.flush()
        return len(self.violations) > before


@contextlib.asynccontextmanager
async def connected(deployment: Deployment, user: str) -> AsyncIterator[Raw]:
    violations: list[str] = []

    async def note(error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            violations.append(str(error))

    login = read_login(deployment.users.nats_file(user))
    client = await nats.connect(
        deployment.nats.address,
        user=login.user,
        password=login.password,
        inbox_prefix=inbox_of(login.user),
        error_cb=note,
        allow_reconnect=False,
    )
    try:
        yield Raw(client, violations)
    finally:
        await client.close()


JOBS = subjects.JOBS_STREAM
MUST_NOT_PUBLISH = {
    "decode-0": [
        "baton.jobs.prefill-0",
        "baton.heartbeat.prefill-0",
        "baton.gatebeat.gateway-0",
        "baton.dead.job",
        f"$JS.API.STREAM.MSG.GET.{JOBS}",
        f"$JS.API.STREAM.MSG.DELETE.{JOBS}",
        f"$JS.API.STREAM.PURGE.{JOBS}",
        f"$JS.API.STREAM.UPDATE.{JOBS}",
        f"$JS.API.STREAM.CREATE.{JOBS}",
        f"$JS.API.CONSUMER.CREATE.{JOBS}.worker-prefill-0.baton.jobs.prefill-0",
        f"$JS.API.CONSUMER.CREATE.{JOBS}.worker-decode-0.baton.jobs.prefill-0",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS}.worker-prefill-0",
        f"$JS.ACK.{JOBS}.worker-prefill-0.1.1.1.1.1",
        "_INBOX.gateway-0.forged",
    ],
    "prefill-0": [
        "baton.jobs.decode-0",
        "baton.heartbeat.decode-0",
        f"$JS.API.STREAM.DELETE.{JOBS}",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS}.worker-decode-0",
    ],
    "gateway-0": [
        "baton.gateway.gateway-1",
        "baton.frames.gateway-1",
        "baton.gatebeat.gateway-1",
        "baton.heartbeat.decode-0",
        f"$JS.API.STREAM.DELETE.{JOBS}",
        f"$JS.API.STREAM.PURGE.{JOBS}",
        f"$JS.API.CONSUMER.CREATE.{JOBS}.mine.baton.jobs.prefill-0",
        "_INBOX.prefill-0.forged",
    ],
    "planner": [
        "baton.jobs.prefill-0",
        "baton.gateway.gateway-0",
        "baton.frames.gateway-0",
        "baton.heartbeat.decode-0",
    ],
    "observer": ["baton.jobs.prefill-0", "baton.worker.prefill-0", "baton.gateway.gateway-0", "$JS.API.STREAM.LIST"],
}
MUST_NOT_HEAR = {
    "decode-0": ["baton.worker.prefill-0", "baton.frames.*", "baton.gateway.*", "baton.jobs.*", "_INBOX.>", ">"],
    "prefill-0": ["baton.worker.*", "baton.dead.*", "_INBOX.gateway-0.>", "$JS.API.>"],
    "gateway-0": [
        "baton.frames.gateway-1",
        "baton.frames.*",
        "baton.gateway.gateway-1",
        "baton.worker.*",
        "_INBOX.gateway-1.>",
        "_INBOX.*.>",
        "baton.jobs.*",
        "$SYS.>",
    ],
    "planner": ["baton.frames.*", "baton.jobs.*", "baton.>"],
    "observer": ["baton.frames.*", "baton.worker.*", "baton.gateway.*", "baton.>"],
}


@pytest.mark.parametrize("user", MUST_NOT_PUBLISH)
async def test_a_user_publishes_nothing_beyond_its_role(deployment: Deployment, user: str) -> None:
    async with connected(deployment, user) as raw:
        allowed = [
            subject
            for subject in MUST_NOT_PUBLISH[user]
            if not await raw.refused(lambda subject=subject: raw.client.publish(subject, b"{}"))
        ]
    assert allowed == []


@pytest.mark.parametrize("user", MUST_NOT_HEAR)
async def test_a_user_hears_nothing_beyond_its_role(deployment: Deployment, user: str) -> None:
    async with connected(deployment, user) as raw:
        allowed = [
            subject
            for subject in MUST_NOT_HEAR[user]
            if not await raw.refused(lambda subject=subject: raw.client.subscribe(subject))
        ]
    assert allowed == []


async def test_what_a_role_needs_is_allowed(deployment: Deployment) -> None:
    """The control of the two tests above: the same question, answered with yes."""
    async with connected(deployment, "decode-0") as raw:
        assert not await raw.refused(lambda: raw.client.publish("baton.frames.gateway-0", b""))
        assert not await raw.refused(lambda: raw.client.subscribe("baton.worker.decode-0"))


async def test_nobody_connects_without_a_user(deployment: Deployment, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("decode-0:guessed\n")
    for credentials in (None, wrong):
        settings = NatsSettings(url=deployment.nats.address, credentials=credentials, connect_timeout_s=0.5)
        with pytest.raises(UnavailableError, match=r"refuses .* --nats-credentials") as caught:
            async with connect_bus(settings, name="stranger"):
                pass
        assert "guessed" not in str(caught.value)


async def test_a_job_goes_from_a_gateway_to_its_worker_and_is_acknowledged(deployment: Deployment) -> None:
    """The worker comes first: its queue opens once the gateway has made the stream."""
    async with connect_bus(deployment.settings("prefill-0"), name="prefill-0", owns_streams=False) as worker:
        queue = await worker.jobs("prefill-0")
        async with connect_bus(deployment.settings("gateway-0"), name="gateway-0") as gateway:
            await gateway.publish_job("prefill-0", a_job())
            [delivery] = await eventually(lambda: queue.fetch(8, expires_s=0.5))
            await delivery.in_progress()
            await delivery.ack()
            given_up = a_job("given-up")
            sequence = await gateway.publish_job("prefill-0", given_up)
            await gateway.delete_job(sequence, given_up)
            assert await queue.fetch(8, expires_s=0.05) == []


async def test_requests_are_answered_between_users_whose_inboxes_are_their_own(deployment: Deployment) -> None:
    async def known(message: ToWorker) -> WorkerReply:
        return Ack(known=isinstance(message, Cancel))

    async with (
        connect_bus(deployment.settings("gateway-0"), name="gateway-0") as gateway,
        connect_bus(deployment.settings("decode-0"), name="decode-0", owns_streams=False) as worker,
    ):
        await worker.serve(subjects.worker("decode-0"), to_worker_decoder, known)
        cancel = Cancel(request_id="request", attempt=1)

        async def answered() -> bool:
            with contextlib.suppress(UnavailableError):  # the server may not know the subscription yet
                answer = await gateway.request(
                    subjects.worker("decode-0"), cancel, worker_reply_decoder, timeout_s=LIMIT_S
                )
                return answer == Ack(known=True)
            return False

        for _ in range(3):  # the right to answer is given anew with each request
            assert await eventually(answered)


async def test_a_job_delivered_too_often_becomes_a_dead_letter_under_permissions(deployment: Deployment) -> None:
    limits = QueueLimits(ack_wait_s=0.2, max_deliver=1)
    async with (
        connect_bus(deployment.settings("gateway-0"), name="gateway-0", limits=limits) as gateway,
        connect_bus(deployment.settings("decode-0"), name="decode-0", limits=limits, owns_streams=False) as worker,
    ):
        queue = await worker.jobs("decode-0")
        await gateway.publish_job("decode-0", a_job("poison"))
        assert await eventually(lambda: queue.fetch(8, expires_s=0.5))

        async def moved() -> bool:
            await queue.fetch(8, expires_s=0.1)
            return gateway.dead_letters > 0

        assert await eventually(moved)


# -- Redis -------------------------------------------------------------------------------------------------------------

REDIS_REFUSED: dict[str, list[tuple[object, ...]]] = {
    "gateway-0": [
        ("FCALL", "baton2_register", 0, "w", "1", 1000),
        ("FCALL", "baton2_announce", 0, "w@1", 0),
        ("SET", "baton:worker:w", "x"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("EVAL", "return 1", 0),
        ("FUNCTION", "DELETE", "baton2"),
        ("ACL", "LIST"),
        ("GET", "somebody:else"),
    ],
    "decode-0": [
        ("FCALL", "baton2_place", 0, "r:1"),
        ("FCALL", "baton2_release", 0, "r:1", "prefill"),
        ("FCALL", "baton2_states", 0),
        ("FCALL", "baton2_register", 0, "prefill-0", "1", 1000, "state", "x"),
        ("FCALL", "baton2_unregister", 0, "prefill-0", "1"),
        ("FUNCTION", "LOAD", "REPLACE", "#!lua name=baton2\nredis.register_function('baton2_place', function() end)"),
        ("HGET", "baton:worker:prefill-0", "state"),
        ("FLUSHALL",),
        ("SMEMBERS", "baton:workers"),
        ("GET", "baton:load:decode:prefill-0"),
    ],
    "planner": [
        ("FCALL", "baton2_place", 0, "r:1"),
        ("FCALL", "baton_states", 0),
        ("DEL", "baton:workers"),
        ("FLUSHALL",),
    ],
    "observer": [("FCALL", "baton2_states", 0), ("SMEMBERS", "baton:workers"), ("CONFIG", "GET", "*")],
}


@pytest.mark.parametrize("user", REDIS_REFUSED)
async def test_a_redis_user_may_do_nothing_beyond_its_role(deployment: Deployment, user: str) -> None:
    async with deployment.redis_as(user) as client:
        for command in REDIS_REFUSED[user]:
            with pytest.raises(redis.exceptions.ResponseError, match=REFUSED):
                await client.execute_command(*command)


@pytest.mark.parametrize(("role", "least"), [("gateway", 3), ("decode", 3), ("planner", 1)])
def test_every_command_that_a_user_s_functions_may_come_to_is_allowed(role: str, least: int) -> None:
    """A command that is missing would be seen by nobody: placement would fall back to heartbeats."""
    granted = {rule.removeprefix("+").upper() for rule in redis_rules(Member(role)).split()}
    allowed, commands = 0, _commands_by_function(LIBRARY.read_text()) | _commands_by_function(BUDGETS.read_text())
    for function, used in commands.items():
        if f"FCALL|{function.upper()}" in granted:
            allowed += 1
            assert used <= granted, f"{function} uses {sorted(used - granted)}"
    assert allowed >= least


def test_every_function_is_somebody_s() -> None:
    granted = {rule for role in ("gateway", "decode") for rule in redis_rules(Member(role)).split()}
    functions = _commands_by_function(LIBRARY.read_text()) | _commands_by_function(BUDGETS.read_text())
    assert {f"+fcall|{function}" for function in functions} <= granted


def _commands_by_function(library: str) -> dict[str, set[str]]:
    """Registered function -> the commands that it and what it calls may use."""
    library = re.sub(r"--.*", "", library)
    parts = re.split(r"^(?:local )?function (\w+)\(", library, flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    bodies = {name: body.split("redis.register_function(")[0] for name, body in bodies.items()}
    found = {}
    for public, name in re.findall(r"register_function\('(baton2?_\w+)', (\w+)\)", library):
        reached, new = {name}, {name}
        while new:
            new = {other for one in new for other in bodies if re.search(rf"\b{other}\(", bodies[one])} - reached
            reached |= new
        found[public] = {command for one in reached for command in re.findall(r"redis\.call\('([A-Z]+)'", bodies[one])}
        assert found[public], public
    return found


async def test_a_gateway_s_user_counts_budgets(deployment: Deployment) -> None:
    async with deployment.redis_as("gateway-0") as client:
        await client.function_load(BUDGETS.read_text(), replace=True)
        for left in (1, 0):
            answer = await client.fcall("baton_budget_take", 0, "acme", f"r{left}", 5, 2, 100, 3, 60_000, 0)
            assert (answer[0], answer[2]) == (b"", left)
        assert await client.fcall("baton_budget_settle", 0, "acme", "r0", 0, 3, 2, 100, 0) == 1


async def test_redis_knows_nobody_without_a_password(deployment: Deployment) -> None:
    async with redis.asyncio.Redis.from_url(deployment.redis.address, protocol=2) as client:
        with pytest.raises(redis.exceptions.AuthenticationError):
            await client.execute_command("PING")


# -- files -------------------------------------------------------------------------------------------------------------


def test_passwords_lie_in_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    users = make_users(MEMBERS, tmp_path / "users")
    files = sorted((tmp_path / "users").iterdir())
    assert len(files) == 2 * (len(MEMBERS) + 1)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    passwords = {read_login(file).password for file in files}
    assert len(passwords) == len(files)  # none is used twice
    assert not any(password in users.redis for password in passwords)  # Redis gets their hashes
    assert not any(password in repr(users) for password in (users.admin_nats.password, users.admin_redis.password))


@pytest.mark.parametrize("text", ["", "no colon", ":password", "user:", "user:one\ntwo"])
def test_a_credentials_file_of_another_form_is_named_without_its_content(tmp_path: Path, text: str) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"credentials file .*credentials: put user:password on one line") as caught:
        read_login(file)
    assert "password" not in str(caught.value).replace("user:password", "")


def test_a_login_never_shows_its_password() -> None:
    assert "hunter2" not in repr(Login("user", "hunter2"))


# -- what is shipped -----------------------------------------------------------------------------------------------------


def baton_users(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "services.users", "--folder", str(folder), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


async def test_the_shipped_configuration_runs_with_the_users_that_the_command_makes(tmp_path: Path) -> None:
    """Users of whole roles, certificates on both sides; a job passes, and what another role may do is refused."""
    code, said = baton_users(tmp_path / "made")
    assert code == 0, said
    certificates = make_certificates(tmp_path / "certificates")
    made = (tmp_path / "made" / "nats-users.conf").read_text()
    async with run_secure_nats(data_dir=tmp_path / "nats", users=made, certificates=certificates) as server:

        def settings(user: str) -> NatsSettings:
            credentials = tmp_path / "made" / f"{user}.nats"
            return NatsSettings(url=server.address, credentials=credentials, tls=certificates.of_client)

        async with (
            connect_bus(settings("gateway"), name="gateway-7f") as gateway,
            connect_bus(settings("prefill"), name="prefill-7f", owns_streams=False) as worker,
        ):
            queue = await worker.jobs("prefill-7f")
            await gateway.publish_job("prefill-7f", a_job())
            [delivery] = await eventually(lambda: queue.fetch(8, expires_s=0.5))
            await delivery.ack()
            with pytest.raises(UnavailableError):
                await worker.publish_job("prefill-7f", a_job("forged"))


async def test_redis_runs_with_the_users_that_the_command_makes(tmp_path: Path) -> None:
    code, said = baton_users(tmp_path / "made", "--members", "decode:decode-0,decode:decode-1")
    assert code == 0, said
    acl = (tmp_path / "made" / "redis-users.acl").read_text()
    assert "user decode-0 " in acl
    assert "user decode " not in acl
    async with run_redis(data_dir=tmp_path / "redis", users=acl) as server:
        for user, allowed in (("decode-0", True), ("decode-1", False)):
            login = read_login(tmp_path / "made" / f"{user}.redis")
            options = {"username": login.user, "password": login.password}
            async with redis.asyncio.Redis.from_url(server.address, protocol=2, **options) as client:  # type: ignore[arg-type]
                command = ("HGET", "baton:worker:decode-0", "state")
                if allowed:
                    assert await client.execute_command(*command) is None
                    continue
                with pytest.raises(redis.exceptions.ResponseError, match=REFUSED):
                    await client.execute_command(*command)


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ("gateway", "write ROLE:ID"),
        ("admin:root", "write ROLE:ID"),
        ("decode:a,prefill:a", "'a' is taken"),
        ("decode:gateway", "'gateway' is taken"),
        ("decode:a.b", "not a valid id"),
    ],
)
def test_members_of_another_form_are_named(members: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        members_of(members)
