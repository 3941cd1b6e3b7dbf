"""The options and the run of a tool that asks a running gateway. Nothing is imported before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

KEYS = {
    "admin-key": "an admin key, as @FILE (or BATON_ADMIN_KEY); by default that of the running `baton up`",
    "api-key": "a key, as @FILE (or BATON_API_KEY); by default that of the running `baton up`",
}


def add_reach(*parsers: argparse.ArgumentParser, key: str = "admin-key") -> None:
    """Add the options that say which gateway, and whose key: one of `KEYS`."""
    for parser in parsers:
        parser.add_argument("--url", help="the gateway; by default that of the running `baton up`")
        parser.add_argument(f"--{key}", help=KEYS[key])
        parser.add_argument("--data-dir", help="folder of the `baton up` to find")


def through_a_gateway(
    command: str, given: argparse.Namespace, run: Callable[[Any], str | None], *, key: str = "admin-key"
) -> int:
    """Print what `run(gateway)` returns, or its error; returns the exit code of `baton COMMAND`."""
    import httpx

    from cli.keys.made import KeysSettings
    from cli.reach import ClientOptions
    from common.settings import ConfigError
    from services.runtime.loading import fail, load_settings

    try:
        told = {flag: getattr(given, flag.replace("-", "_")) for flag in ("url", key, "data-dir")}
        flags = [part for flag, value in told.items() if value is not None for part in (f"--{flag}", value)]
        if key == "admin-key":
            gateway = load_settings(KeysSettings, command=command, arguments=flags).administered()
        else:
            gateway = load_settings(ClientOptions, command=command, arguments=flags).gateway()
        if (told_back := run(gateway)) is not None:
            print(told_back)
    except (ConfigError, OSError, ValueError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))
    return 0
