"""Vectors of a file's texts, one a line: `baton embed FILE`, through a running gateway.

A line is a text, or a JSON object with it in `--field`. The vectors are lines of JSON, or with `-o NAME.npy` an array that
numpy loads.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cli.keys.reach import add_reach, through_a_gateway


def main() -> int:
    """Entry point; returns the exit code."""
    given = _parser().parse_args()
    return through_a_gateway("embed", given, lambda gateway: _run(given, gateway), key="api-key")


def _run(given: argparse.Namespace, gateway: Any) -> None:
    from cli.embed.vectors import embed

    embed(given, gateway)


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
    add_reach(parser, key="api-key")
    return parser


if __name__ == "__main__":
    sys.exit(main())
