"""The time of one request, part by part, in the terminal: `baton trace [REQUEST]`."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from cli.reach import Gateway
from cli.said import message_of
from cli.trace.settings import TraceSettings
from cli.trace.view import listed, table, waterfall
from common.settings import ConfigError
from services.runtime.loading import fail, load_settings

ID = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
WORDS = ("slowest", "latest")  # the first of these lists
LISTED = 10
ASK = "which? its number, or Enter to leave: "
WIDTH = 160  # columns where there is no terminal


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(TraceSettings, command="trace", arguments=sys.argv[1:])
        if Path(settings.request).is_file():
            return _print(settings, _read(settings.request))
        gateway = settings.gateway(admin=True)
        code = trace(settings, gateway)
        sys.stdout.flush()
        return code
    except (ConfigError, ValueError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))


def trace(settings: TraceSettings, gateway: Gateway) -> int:
    """Print one request's waterfall (with all choices), or lists to choose from; on a terminal ask for the choice."""
    if settings.request and settings.request not in WORDS:
        return _print(settings, _get(gateway, _path(settings.request)))
    told = _get(gateway, f"/debug/requests?limit={LISTED}")
    if settings.request:
        entries = told[settings.request]
        if not entries:
            raise ConfigError(f"{gateway.url}: no request ended recently")
        return _print(settings, _get(gateway, _path(entries[0]["request_id"])))
    _print(settings, told)
    ids = listed(told)
    while ids and not settings.print_json and sys.stdin.isatty() and sys.stdout.isatty():
        if (chosen := _chosen(ids)) is None:
            break
        _print(settings, _get(gateway, _path(chosen)))
    return 0


def _chosen(ids: Sequence[str]) -> str | None:
    while True:
        try:
            typed = input(ASK).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        if not typed or typed in ("q", "quit"):
            return None
        if typed.isdigit() and 1 <= int(typed) <= len(ids):
            return ids[int(typed) - 1]
        print(f"a number from 1 to {len(ids)}")


def _print(settings: TraceSettings, told: Any) -> int:
    if settings.print_json:
        print(json.dumps(told, indent=2))
        return 0
    columns, styled = shutil.get_terminal_size((WIDTH, 24)).columns, sys.stdout.isatty()
    if isinstance(told.get("requests"), list):
        print("\n\n".join("\n".join(waterfall(request, columns, styled=styled)) for request in told["requests"]))
    else:
        print("\n".join(table(told, columns)))
    return 0


def _read(path: str) -> Any:
    """Read the output of `--json`. Raises ConfigError."""
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(told.get("requests"), list) or isinstance(told.get("latest"), list):
            return told
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError):
        pass
    raise ConfigError(f"{path}: not the output of `baton trace --json`")


def _path(request: str) -> str:
    if not ID.fullmatch(request):
        raise ConfigError(f"{request[:80]!r} is neither the id of a request nor a file")
    return f"/debug/requests/{request}"


def _get(gateway: Gateway, path: str) -> Any:
    with gateway.client(timeout_s=10) as client:
        response = client.get(path)
    if response.status_code == 200:
        return response.json()
    raise ConfigError(f"{gateway.url}: {message_of(response.content) or f'status {response.status_code}'}")


if __name__ == "__main__":
    sys.exit(main())
