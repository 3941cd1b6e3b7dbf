"""`baton keys new [TENANT]`: a new API key, and its entry for the file of tenants."""

from __future__ import annotations

import argparse
import re
import sys

DEFAULT = "default"  # the tenant of a deployment that names none


def main() -> int:
    """Entry point; returns the exit code. The key is printed once and stored nowhere."""
    parser = argparse.ArgumentParser(
        prog="baton keys", description="Make an API key; only its SHA-256 is kept in a file."
    )
    parser.add_argument("action", choices=["new"])
    parser.add_argument("tenant", nargs="?", default=DEFAULT, help="whose key it is (default: %(default)s)")
    parser.add_argument("--admin", action="store_true", help="an admin key, for /metrics, /debug and /admin")
    arguments = parser.parse_args()
    # Imported here, so that help doesn't wait for the gateway's room.
    from gateway.tenants.tenants import TENANT_NAME, hash_key, new_key

    if not re.match(TENANT_NAME, arguments.tenant):
        parser.error(f"TENANT {arguments.tenant!r}: 1 to 64 letters, digits and _.-")
    key = new_key()
    print(f"key, shown only here: {key}\n\nin the file of --tenants (then send the gateway SIGHUP):\n")
    hashed = f'["{hash_key(key).hex()}"]'
    if arguments.admin:
        print(f"admin_keys_sha256 = {hashed}")
    else:
        print(f'[tenants."{arguments.tenant}"]\nkeys_sha256 = {hashed}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
