"""Vectors of a file's texts, one a line: `baton embed FILE`, through a running gateway.

A line is a text, or a JSON object with it in `--field`. The vectors are lines of JSON, or with `-o NAME.npy` an array that
numpy loads.
"""

from __future__ import annotations

import argparse
import sys

_REACH = {
    "url": "the gateway; by default that of the running `baton up`",
    "api-key": "a key, as @FILE (or BATON_API_KEY); by default that of the running `baton up`",
    "data-dir": "folder of the `baton up` to find",
}


def main() -> int:
    """Entry point; returns the exit code."""
    given = _parser().parse_args()
    # Imported here, so that help waits for no client.
    import httpx

    from cli.embed.vectors import embed
    from cli.reach import ClientOptions
    from common.settings import ConfigError
    from services.runtime.loading import fail, load_settings

    try:
        told = {flag: getattr(given, flag.replace("-", "_")) for flag in _REACH}
        flags = [part for flag, value in told.items() if value is not None for part in (f"--{flag}", value)]
        gateway = load_settings(ClientOptions, command="embed", arguments=flags).gateway()
        embed(given, gateway)
    except (ConfigError, OSError, ValueError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(gateway.silent(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton embed", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="the texts; - reads standard input")
    parser.add_argument(
        "-o", "--out", default="", help="NAME.npy, or a file for lines of JSON; by default standard output"
    )
    parser.add_argument("--model", default="", help="by default the only model of embeddings that is served")
    parser.add_argument("--field", default="text", help="of JSON lines (default: %(default)s)")
    parser.add_argument("--dimensions", type=int, default=0, help="the first ones alone; 0: all")
    parser.add_argument("--prompt-name", default="", help="a prompt of the model before each text, as query")
    parser.add_argument("--batch", type=int, default=64, help="texts of a request (default: %(default)s)")
    for flag, about in _REACH.items():
        parser.add_argument(f"--{flag}", help=about)
    return parser


if __name__ == "__main__":
    sys.exit(main())
