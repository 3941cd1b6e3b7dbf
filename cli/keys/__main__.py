"""API keys: `baton keys create`, `list`, `revoke` through a running gateway; `new` makes lines for the file of tenants."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from cli.keys.reach import add_reach, through_a_gateway

DEFAULT = "default"  # the tenant of a deployment without named ones


def main() -> int:
    """Entry point; returns the exit code. A key is printed once and stored nowhere."""
    given = _parser().parse_args()
    tenant = getattr(given, "tenant", DEFAULT)
    # Imported here, so that help doesn't wait for the gateway's package.
    from gateway.tenants.tenants import TENANT_NAME

    if not re.match(TENANT_NAME, tenant):
        _parser().error(f"TENANT {tenant!r}: 1 to 64 letters, digits and _.-")
    if given.action == "new":
        return new(tenant, is_admin=given.admin)
    return through_a_gateway("keys", given, lambda gateway: _run(given, gateway))


def new(tenant: str, *, is_admin: bool) -> int:
    """Print a key and its entry for the file."""
    from gateway.tenants.tenants import hash_key, new_key

    key = new_key()
    print(f"key, shown only here: {key}\n\nin the file of --tenants (then send the gateway SIGHUP):\n")
    hashed = f'["{hash_key(key).hex()}"]'
    if is_admin:
        print(f"admin_keys_sha256 = {hashed}")
    else:
        print(f'[tenants."{tenant}"]\nkeys_sha256 = {hashed}')
    return 0


def _run(given: argparse.Namespace, gateway: Any) -> str:
    from cli.keys.made import run

    return run(given.action, given, gateway)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton keys", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|list|revoke|new")
    make = actions.add_parser("create", help="make a key that all gateways take", allow_abbrev=False)
    listed = actions.add_parser("list", help="keys, and what each used", allow_abbrev=False)
    revoke = actions.add_parser("revoke", help="refuse a key from now on", allow_abbrev=False)
    lines = actions.add_parser("new", help="make a key and its lines for the file of --tenants; asks no gateway")
    for one in (make, lines):
        one.add_argument("tenant", nargs="?", default=DEFAULT, help="whose key it is (default: %(default)s)")
        one.add_argument("--admin", action="store_true", help="an admin key, for /metrics, /debug, /console and /admin")
    make.add_argument("--name", default="", help="a note of whose it is, or what for")
    make.add_argument("--expires-days", type=float, default=0, metavar="DAYS", help="0: valid until it is revoked")
    listed.add_argument("--all", action="store_true", help="revoked and expired ones, too")
    revoke.add_argument("id", help="as `list` shows it")
    for one in (make, listed, revoke):
        one.add_argument("--json", dest="print_json", action="store_true", help="print what the gateway answers")
    add_reach(make, listed, revoke)
    return parser


if __name__ == "__main__":
    sys.exit(main())
