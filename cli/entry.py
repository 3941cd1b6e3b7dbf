"""The entry of `baton COMMAND …`. Commands import their needs when they run; help needs the standard library alone."""

from __future__ import annotations

import difflib
import os
import runpy
import sys

from common import VERSION
from services.runtime.commands import COMMANDS, HELP, let_threads_sleep, remedy, settings_of

PACKAGES = (
    "cli",
    "services",
    "gateway",
    "prefill",
    "decode",
    "worker",
    "planner",
    "telemetry",
    "engine",
    "kvtransfer",
    "modelfiles",
    "common",
)
OLDEST = (3, 11)


def run(arguments: list[str] | None) -> int:
    """Run a command; return the exit code."""
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str] | None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "help" and rest:
        name, rest = rest[0], ["--help", *rest[1:]]
    if name in (*HELP, "help"):
        print(overview(), flush=True)
        return 0
    if name in ("-V", "--version", "version"):
        print("baton", VERSION)
        return 0
    if name not in COMMANDS:
        return _wrong(f"unknown command {name!r}{_nearest(name)}; see baton --help")
    if sys.version_info < OLDEST:
        return _wrong(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}")
    sys.argv = [f"baton {name}", *rest]
    try:
        if set(rest) & set(HELP):
            _help_quickly(name, rest)
        let_threads_sleep()
        runpy.run_module(COMMANDS[name].package, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise
        return _wrong(f"`baton {name}` needs the package {error.name}: {remedy()}")
    return 0


def overview() -> str:
    """List all commands, a line each."""
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: baton COMMAND [options]", ""]
    lines += [f"  {name:<{width}}{command.about}" for name, command in COMMANDS.items()]
    lines += ["", "baton COMMAND --help: its common options; --help-all: all of them. baton --version"]
    return "\n".join(lines)


def _help_quickly(name: str, rest: list[str]) -> None:
    """Print a command's options and exit, without importing the command; return if it has its own help."""
    if (kind := settings_of(name)) is not None:
        from services.runtime.loading import load_settings

        load_settings(kind, command=name, arguments=rest)


def _nearest(name: str) -> str:
    near = difflib.get_close_matches({"serve": "up", "run": "chat", "start": "up"}.get(name, name), COMMANDS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _wrong(text: str) -> int:
    print(f"baton: {text}", file=sys.stderr)
    return 2
