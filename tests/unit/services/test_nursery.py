"""Where `baton up`'s workers come from, without torch: a nursery that fails, and processes that were adopted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.settings import ROOT, ConfigError
from services.host.child import Child
from services.host.nursery import Adopted, Nursery, open_nursery
from services.nursery import beginning
from services.nursery.beginning import Beginning, begin_ahead
from services.nursery.birth import REFUSED
from services.up import __main__ as up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each worker is started by itself")

CALLED = """
from services.runtime.linux import be_called
be_called(["python", "-m", "services.decode"])
print(open("/proc/self/cmdline").read().strip("\\0").replace("\\0", " "))
be_called(["x" * 10_000])
print(len(open("/proc/self/cmdline").read()))
"""


FORKED = """
import os, socket
from services.nursery.__main__ import forked
from services.runtime.linux import adopt_orphans
link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
assert adopt_orphans()
nursery = os.fork()
if not nursery:
    if forked(os.getppid(), theirs):
        FATE
    os._exit(0)
for pid in (int(link.recv(20)), nursery):
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture
def failing() -> Iterator[Nursery]:
    """A nursery that ends without having imported anything."""
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.setblocking(False)
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"], stdin=theirs.fileno())
    nursery = Nursery(Beginning(process, link, os.memfd_create("said")), workers=1)
    yield nursery
    nursery.close()


async def test_a_worker_is_started_by_itself_where_the_nursery_failed(failing: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    child = Child(name="d", service="planner", settings={"BATON_LOG_LEVEL": "?"}, log_file=log, bear=failing.born)
    await child.start()
    assert await child.wait() == 2
    assert "--log-level" in log.read_text()
    assert await failing.born("decode", {}, log) is None


@pytest.mark.parametrize(
    ("end", "code"), [(Adopted.terminate, -signal.SIGTERM), (Adopted.kill, -signal.SIGKILL), (None, 3)]
)
async def test_an_adopted_process_ends_as_one_of_asyncio_does(end: object, code: int) -> None:
    adopted = Adopted(started("sleep 60" if end else "exit 3"))
    if callable(end):
        assert adopted.returncode is None
        end(adopted)
    assert await adopted.wait() == code == adopted.returncode
    adopted.kill()  # nobody is there any more: nothing happens
    assert await adopted.wait() == code


@pytest.fixture
def asked() -> Iterator[tuple[Nursery, socket.socket]]:
    """A nursery that is only a process, and its end of the link, on which the test answers."""
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.setblocking(False)
    nursery = Nursery(Beginning(subprocess.Popen(["sleep", "600"]), link, os.memfd_create("said")), workers=1)
    with theirs:
        yield nursery, theirs
    nursery.close()


async def test_a_worker_that_cannot_be_watched_is_ended(
    asked: tuple[Nursery, socket.socket], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nursery, theirs = asked
    pid = started("sleep 600")
    theirs.send(str(pid).encode())
    monkeypatch.setattr("os.pidfd_open", refusing)
    assert await nursery.born("decode", {}, tmp_path / "log") is None
    assert is_gone(pid)


async def test_a_worker_that_dies_before_it_begins_is_noticed_at_once(
    asked: tuple[Nursery, socket.socket], tmp_path: Path
) -> None:
    """It had 180 s to say that it lives: where memory was short, `up` stood as long."""
    nursery, theirs = asked
    for _ in range(2):
        pid = started("kill -9 $$")
        theirs.send(str(pid).encode())
        assert await nursery.born("decode", {}, tmp_path / "log") is None
        assert is_gone(pid)
    lives = started("sleep 600")
    for _ in range(2):
        theirs.send(str(lives).encode())
    adopted = await nursery.born("decode", {}, tmp_path / "log")
    assert adopted is not None
    assert adopted.pid == lives
    adopted.kill()
    assert await adopted.wait() == -signal.SIGKILL


async def test_a_model_that_a_worker_would_refuse_is_told_as_it_stands(
    asked: tuple[Nursery, socket.socket], tmp_path: Path
) -> None:
    """Nothing is started by itself then, which would say the same later."""
    nursery, theirs = asked
    theirs.send(REFUSED + b"config.json: mystery = 1 is not supported")
    child = Child(
        name="d", service="decode", settings={"BATON_MODEL": "/m"}, log_file=tmp_path / "log", bear=nursery.born
    )
    with pytest.raises(ConfigError, match=r"^--model /m: config\.json: mystery = 1 is not supported$"):
        await child.start()
    assert child.pid is None
    lives = started("sleep 600")
    for _ in range(2):
        theirs.send(str(lives).encode())
    await child.start()  # the nursery goes on
    assert child.pid == lives
    child.kill()
    assert await child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("fate", "ended"), [("os.kill(os.getpid(), 9)", "-9"), ("os._exit(3)", "3")])
def test_the_caller_knows_of_a_fork_before_that_says_anything(fate: str, ended: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED.replace("FATE", fate)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == ([ended, "0"], "")


def test_a_worker_that_nobody_was_told_of_ends_with_the_nursery(asked: tuple[Nursery, socket.socket]) -> None:
    nursery, theirs = asked
    pid = started("sleep 600")
    theirs.send(str(pid).encode())
    nursery.close()
    assert is_gone(pid)
    with pytest.raises(BrokenPipeError):  # the next one ends by itself
        theirs.send(b"1")


def test_there_is_no_nursery_where_processes_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.pidfd_open", refusing)
    assert open_nursery(1) is None


def test_a_nursery_begins_ahead_where_it_is_likely_of_use(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[Nursery, socket.socket], tmp_path: Path
) -> None:
    begun = asked[0]._begun
    monkeypatch.setattr(beginning, "begin", lambda: begun)
    monkeypatch.setattr(beginning, "GPUS", tmp_path / "nvidiactl")
    assert begin_ahead(["--port", "1"]) is begun
    assert begin_ahead(["--port", "1", "--help"]) is None
    beginning.GPUS.touch()
    assert begin_ahead(["--port", "1"]) is None


@pytest.mark.parametrize("arguments", [["--port", "none"], ["--models", "a=/nowhere,b=/nowhere"]])
def test_a_nursery_that_began_ahead_of_refused_options_ends(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[Nursery, socket.socket], arguments: list[str]
) -> None:
    begun = asked[0]._begun
    monkeypatch.setattr(up, "begin_ahead", lambda arguments: begun)
    monkeypatch.setattr(sys, "argv", ["baton up", *arguments])
    assert up.main() == 2
    assert is_gone(begun._process.pid)
    assert begun.link.fileno() == -1


def is_gone(pid: int) -> bool:
    """Whether a child of this process ended and was waited for."""
    try:
        return os.waitpid(pid, os.WNOHANG) is None
    except ChildProcessError:
        return True


def refusing(pid: int) -> int:
    raise PermissionError("pidfd_open")  # as sandboxes do


def started(line: str) -> int:
    return os.posix_spawn("/bin/sh", ["sh", "-c", line], os.environ)


def test_a_process_is_called_what_it_became() -> None:
    done = subprocess.run([sys.executable, "-c", CALLED], cwd=ROOT, capture_output=True, text=True, check=True)
    name, length = done.stdout.splitlines()
    assert name == "python -m services.decode"
    assert int(length) <= len("\0".join([sys.executable, "-c", CALLED])) + 1
