"""Files of credentials: who reads them, what they may hold, and what the command makes works."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions

from cli.users.__main__ import main, members_of
from common.access import Login, read_login
from common.bus import NatsSettings, connect_bus
from common.errors import UnavailableError
from common.settings import ConfigError
from services.runtime.permissions import make_users
from services.runtime.servers import run_redis
from tests.certificates import make_certificates
from tests.integration.access.deployment import MEMBERS, REFUSED
from tests.integration.bus.looks import a_job
from tests.integration.waiting import eventually
from tests.secure_servers import run_secure_nats

ROOT = Path(__file__).resolve().parents[3]


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


def baton_users(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "cli.users", str(folder), *options],
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
    assert len((tmp_path / "made" / "metrics-key").read_text()) > 40
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


async def test_users_for_an_upgrade_may_enter_themselves_as_0_1_0_s_workers_do(tmp_path: Path) -> None:
    code, said = baton_users(tmp_path / "made", "decode:decode-0", "--beside-0-1-0")
    assert code == 0, said
    login = read_login(tmp_path / "made" / "decode-0.redis")
    options = {"username": login.user, "password": login.password}
    async with (
        run_redis(data_dir=tmp_path / "redis", users=(tmp_path / "made" / "redis-users.acl").read_text()) as server,
        redis.asyncio.Redis.from_url(server.address, protocol=2, **options) as client,  # type: ignore[arg-type]
    ):
        assert await client.sadd("baton:workers", "decode-0") == 1
        assert await client.hset("baton:worker:decode-0", "incarnation", "1") == 1
        assert await client.set("baton:news:decode-0", "x")
        with pytest.raises(redis.exceptions.ResponseError, match=REFUSED):
            await client.hset("baton:worker:decode-1", "incarnation", "1")


async def test_redis_runs_with_the_users_that_the_command_makes(tmp_path: Path) -> None:
    code, said = baton_users(tmp_path / "made", "decode:decode-0,decode:decode-1")
    assert code == 0, said
    acl = (tmp_path / "made" / "redis-users.acl").read_text()
    assert "user decode-0 " in acl
    assert "user decode " not in acl
    async with run_redis(data_dir=tmp_path / "redis", users=acl) as server:
        for user, allowed in (("decode-0", True), ("decode-1", False)):
            login = read_login(tmp_path / "made" / f"{user}.redis")
            options = {"username": login.user, "password": login.password}
            async with redis.asyncio.Redis.from_url(server.address, protocol=2, **options) as client:  # type: ignore[arg-type]
                command = ("GET", "baton:told:decode-0")
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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["decode:decode-0"], "write the folder first: baton users users decode:decode-0"),
        (["--folder", "made"], "--folder: an argument since 0.2: baton users FOLDER"),
        (["made", "--members", "decode:decode-0"], "--members: an argument since 0.2: baton users FOLDER ROLE:ID"),
    ],
)
def test_a_command_line_of_another_form_is_told_the_right_one(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["users", *arguments])
    assert main() == 2
    assert told in capsys.readouterr().err
