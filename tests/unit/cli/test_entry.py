"""`baton COMMAND`: one entry, quick and helpful before anything is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.completion.scripts import bash, fish, options, zsh
from cli.entry import overview
from common import VERSION
from services.runtime import commands
from services.runtime.commands import COMMANDS, settings_of
from services.runtime.flags import ARGUMENTS, flag_of

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("msgspec", "nats", "redis", "httpx", "torch", "fastapi", "numpy")


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Baton by a Python that has nothing installed."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from cli.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_commands_are_listed_before_anything_is_installed(arguments: list[str]) -> None:
    done = bare(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "9"}])
def test_commands_tell_openmp_s_threads_to_sleep_unless_told_otherwise(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict[str, str]()
    monkeypatch.setattr("os.environ", environment := dict(given))
    monkeypatch.setattr("runpy.run_module", lambda *_, **__: found.update(environment))
    assert main(["top"]) == 0
    assert found == (given or {"GOMP_SPINCOUNT": "2000"})


def test_what_is_missing_is_named_with_the_remedy() -> None:
    done = bare("up")
    assert done.returncode == 2
    assert re.match(r"baton: `baton up` needs the package \w+: run `make setup` in /", done.stderr)
    assert bare("-V").stdout == f"baton {VERSION}\n"


def test_no_remedy_names_the_distribution_while_a_stranger_could_have_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    assert "'.[all]'" in commands.remedy()
    assert "baton-serve" not in commands.remedy()


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runpy.run_module", interrupted)
    assert main(["keys", "list"]) == 130


INTERRUPTED = """
import os, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == IMPORTED:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["baton", "up"]
runpy.run_module("cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("imported", ["cli.entry", "services.runtime.commands", "services.up", "services.up.settings"])
def test_ctrl_c_ends_up_quietly_while_it_imports(imported: str) -> None:
    """On a busy machine that takes seconds."""
    code = INTERRUPTED.replace("IMPORTED", repr(imported))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("typed", "meant"), [("tpo", "top"), ("serve", "up"), ("gatway", "gateway"), ("run", "chat")])
def test_the_nearest_command_is_suggested(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    assert f"unknown command '{typed}' (did you mean {meant}?)" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.settings])
def test_help_loads_no_more_than_the_settings(command: str) -> None:
    code = "import sys; from cli.__main__ import main\n"
    code += f"try: main([{command!r}, '--help'])\n"
    code += f"except SystemExit: print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0].startswith(f"usage: baton {command}")
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-200:]


def test_every_command_is_there() -> None:
    for name, command in COMMANDS.items():
        assert (ROOT / command.package.replace(".", "/") / "__main__.py").is_file(), name
        assert command.about in overview()


def test_completion_knows_every_command_and_option() -> None:
    known = options()
    for command in COMMANDS:
        kind = settings_of(command)
        names = [name for name in kind.model_fields if name not in ARGUMENTS] if kind else []
        flags = {flag_of(name).replace("--", "") for name in names}
        offered = {option.flag.removeprefix("--no-").removeprefix("--") for option in known[command]}
        assert flags <= offered, command
    for script in (bash(known), zsh(known), fish(known)):
        assert "gateway" in script
        assert "kv-memory-mb" in script


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("c",), "chat completion"),
        (("up", "--pref"), "--prefill"),
        (("up", "--dtype", "b"), "bfloat16"),
        (("completion", "f"), "fish"),
        (("keys", "c"), "create"),
        (("batch", "s"), "submit"),
        (("up", "--model", "x"), ""),
    ],
)
def test_bash_completes(words: tuple[str, ...], offered: str, tmp_path: Path) -> None:
    script = tmp_path / "baton.bash"
    typed = " ".join(f"'{word}'" for word in words)
    asks = f"COMP_WORDS=(baton {typed}); COMP_CWORD={len(words)}; _baton; echo ${{COMPREPLY[@]}}"
    script.write_text(f"{bash(options())}\n{asks}\n")
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (offered, "")


@pytest.mark.parametrize(("shell", "render"), [("zsh", zsh), ("fish", fish)])
def test_other_shells_can_read_theirs(shell: str, render: object, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    script = tmp_path / f"baton.{shell}"
    script.write_text({"zsh": zsh, "fish": fish}[shell](options()))
    assert subprocess.run([shell, "-n", str(script)], capture_output=True, check=False).returncode == 0
