"""Aliases of models: `baton alias list`, `set`, `rollback`, `rm` through a running gateway, for canaries and comparisons."""

from __future__ import annotations

import argparse
import sys
from typing import Any
from urllib.parse import quote

from cli.keys.reach import add_reach, through_a_gateway


def main() -> int:
    """Entry point; returns the exit code."""
    given = _parser().parse_args()
    return through_a_gateway("alias", given, lambda gateway: "\n".join(run(given, gateway)))


def run(given: argparse.Namespace, gateway: Any) -> list[str]:
    """Return the lines to print. Raises ValueError, ConfigError with the gateway's message, or httpx.HTTPError."""
    from cli.keys.made import ask
    from gateway.tenants.shares import Share, read_share

    def line(told: dict[str, Any]) -> str:
        return f"{told['name']} = {', '.join(Share(**share).written() for share in told['shares'])}"

    if given.action == "set":
        texts = [text if "@" in text or len(given.shares) > 1 else f"{text}@100%" for text in given.shares]
        shares = [read_share(text) for text in texts]
        named = [{name: value for name in Share.__struct_fields__ if (value := getattr(one, name))} for one in shares]
        return [line(ask(gateway, "POST", "/admin/aliases", {"name": given.name, "shares": named}))]
    if given.action == "rollback":
        return [line(ask(gateway, "POST", "/admin/aliases/rollback", {"name": given.name}))]
    if given.action == "rm":
        ask(gateway, "DELETE", f"/admin/aliases/{quote(given.name, safe='')}")
        return [f"{given.name} is dropped"]
    listed = ask(gateway, "GET", "/admin/aliases")
    return [line(told) for told in listed["aliases"]] or [f"no aliases; models: {', '.join(listed['models'])}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton alias", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|set|rollback|rm")
    listed = actions.add_parser("list", help="aliases and their shares", allow_abbrev=False)
    setting = actions.add_parser("set", help="share an alias's requests out among models", allow_abbrev=False)
    back = actions.add_parser("rollback", help="put the earlier shares back", allow_abbrev=False)
    dropped = actions.add_parser("rm", help="drop what was set", allow_abbrev=False)
    for one in (setting, back, dropped):
        one.add_argument("name", help="the name that clients ask for")
    setting.add_argument(
        "shares", nargs="+", metavar="MODEL@SHARE", help="as old@95%% new@5%%, new@tenant:NAME or new@header:NAME:VALUE"
    )
    add_reach(listed, setting, back, dropped)
    return parser


if __name__ == "__main__":
    sys.exit(main())
