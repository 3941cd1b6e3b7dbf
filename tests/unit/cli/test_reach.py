"""Which gateway a tool talks to, and with which key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cli.reach import DEFAULT_URL, ClientOptions
from common.settings import ConfigError
from services.runtime.loading import load_settings
from services.runtime.running import FILE, Running, announced, birth_of, find_running, read_running

OPENAI = {"OPENAI_BASE_URL": "https://api.example.org/v1", "OPENAI_API_KEY": "sk-theirs"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `baton up` of the person who tests is found, and none of their variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("services.runtime.running.ROOT", tmp_path)
    for name in OPENAI:
        monkeypatch.delenv(name, raising=False)


def a_stack(**changes: object) -> Running:
    values = {"url": "http://127.0.0.1:18000", "pid": os.getpid(), "born": birth_of(os.getpid())}
    return msgspec.convert(values | changes, Running)


def options(*flags: str) -> ClientOptions:
    return load_settings(ClientOptions, command="test", arguments=flags, environment={})


def test_a_running_stack_is_found_from_folders_below_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, below = tmp_path / ".baton", tmp_path / "a" / "b"
    data.mkdir()
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    with announced(a_stack(), data):
        assert (data / FILE).stat().st_mode & 0o777 == 0o600
        found = options().gateway()
        assert (found.url, found.said) == ("http://127.0.0.1:18000", f"`baton up` in {data}")
    assert find_running(Path(".baton")) is None
    assert options().gateway().url == DEFAULT_URL


def test_a_removed_folder_is_below_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    assert find_running(Path(".baton")) is None


def test_one_that_was_killed_is_nobody(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    born = birth_of(gone.pid)
    gone.wait()
    with announced(a_stack(pid=gone.pid, born=born), tmp_path):
        assert read_running(tmp_path) is None
    with announced(a_stack(born="1"), tmp_path):  # the number was given out again
        assert read_running(tmp_path) is None
    with announced(a_stack(), tmp_path):
        assert read_running(tmp_path) is not None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"url": 1, "pid": 1}', '{"url": "http://x", "pid": 1e99}'])
def test_a_file_that_says_nothing_is_no_stack(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert read_running(tmp_path) is None


def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    with announced(a_stack(), tmp_path):
        (tmp_path / FILE).chmod(0o666)
        assert read_running(tmp_path) is None


def test_what_a_newer_release_adds_is_ignored(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(msgspec.json.encode(msgspec.to_builtins(a_stack()) | {"later": [1]}))
    (tmp_path / FILE).chmod(0o600)
    assert read_running(tmp_path) == a_stack()


def test_options_win_then_the_stack_then_openais_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPENAI.items():
        monkeypatch.setenv(name, value)
    theirs = options().gateway()
    assert (theirs.url, theirs.api_key, theirs.said) == ("https://api.example.org", "sk-theirs", "OPENAI_BASE_URL")
    (tmp_path / ".baton").mkdir()
    with announced(a_stack(), tmp_path / ".baton"):
        assert options().gateway().url == "http://127.0.0.1:18000"
        told = options("--url", "http://h:1/v1/", "--api-key", "mine").gateway()
        assert (told.url, told.headers) == ("http://h:1", {"authorization": "Bearer mine"})


def test_a_key_made_for_openai_goes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-theirs")
    assert options().gateway().headers == {}
    assert options("--url", "http://h:1").gateway().headers == {}
    (tmp_path / ".baton").mkdir()
    with announced(a_stack(), tmp_path / ".baton"):
        assert options().gateway().headers == {}


def test_keys_of_a_stack_are_read_from_its_files_and_never_shown(tmp_path: Path) -> None:
    data = tmp_path / ".baton"
    data.mkdir()
    for name in ("one", "admin"):
        (data / name).write_text(f"{name}-key\n")
    with announced(a_stack(api_key_file=str(data / "one"), admin_key_file=str(data / "admin")), data):
        assert options().gateway().api_key == "one-key"
        found = options().gateway(admin=True)
        assert found.api_key == "admin-key"
        assert "admin-key" not in repr(found)
        assert options("--api-key", "mine").gateway(admin=True).api_key == "mine"
        (data / "one").unlink()
        with pytest.raises(ConfigError, match="No such file"):
            options().gateway()


def test_an_address_is_checked() -> None:
    with pytest.raises(ConfigError, match="--url localhost:8000: an address begins with http"):
        options("--url", "localhost:8000").gateway()
