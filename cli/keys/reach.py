"""The options and the run of a tool that asks a gateway's administrators' routes. Nothing is imported before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

REACH = {
    "url": "the gateway; by default that of the running `baton up`",
    "admin-key": "an admin key, as @FILE (or BATON_ADMIN_KEY); by default that of the running `baton up`",
    "data-dir": "folder of the `baton up` to find",
}


def add_reach(*parsers: argparse.ArgumentParser) -> None:
    """Add the options that say which gateway, and whose key."""
    for parser in parsers:
        for flag, about in REACH.items():
            parser.add_argument(f"--{flag}", help=about)


def through_a_gateway(command: str, given: argparse.Namespace, run: Callable[[Any], str]) -> int:
    """Print what `run(gateway)` returns, or its error; returns the exit code of `baton COMMAND`."""
    import httpx

    from cli.keys.made import KeysSettings
    from common.settings import ConfigError
    from services.runtime.loading import fail, load_settings

    try:
        told = {flag: getattr(given, flag.replace("-", "_")) for flag in REACH}
        flags = [part for flag, value in told.items() if value is not None for part in (f"--{flag}", value)]
        gateway = load_settings(KeysSettings, command=command, arguments=flags).administered()
        print(run(gateway))
    except (ConfigError, ValueError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))
    return 0
