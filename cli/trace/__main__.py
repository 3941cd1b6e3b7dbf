"""Where the time of a request went, in the terminal: `baton trace [REQUEST]`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from cli.reach import Gateway
from cli.trace.settings import TraceSettings
from cli.trace.view import table, waterfall
from common.settings import ConfigError
from services.runtime.loading import fail, load_settings


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(TraceSettings, command="trace", arguments=_named(sys.argv[1:]))
        gateway = settings.gateway(admin=True)
        code = trace(settings, gateway)
        sys.stdout.flush()
        return code
    except (ConfigError, ValueError) as error:
        return fail(error)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))


def trace(settings: TraceSettings, gateway: Gateway) -> int:
    """Print one request's waterfall (all choices of an answer), or without a request the lists to choose from."""
    path = f"/debug/requests/{settings.request}" if settings.request else "/debug/requests?limit=10"
    told = _get(gateway, path)
    if settings.print_json:
        print(json.dumps(told, indent=2))
        return 0
    columns = shutil.get_terminal_size((160, 24)).columns
    if settings.request:
        pictures = ["\n".join(waterfall(request, columns)) for request in told["requests"]]
        print("\n\n".join(pictures))
    else:
        print("\n".join(table(told, columns)))
    return 0


def _get(gateway: Gateway, path: str) -> Any:
    with gateway.client(timeout_s=10) as client:
        response = client.get(path)
    if response.status_code == 200:
        return response.json()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    raise ConfigError(f"{gateway.url}: {message}")


def _named(arguments: Sequence[str]) -> list[str]:
    """`baton trace ID …` is `baton trace --request ID …`."""
    first = list(arguments[:1])
    return ["--request", *arguments] if first and not first[0].startswith("-") else list(arguments)


if __name__ == "__main__":
    sys.exit(main())
