"""The generator of users for NATS and Redis, and of Prometheus' key: `baton users`."""

from __future__ import annotations

import sys

from cli.users.settings import UsersSettings
from common.access import write_secret
from common.settings import ConfigError
from gateway.tenants.tenants import new_key
from services.runtime.loading import fail, load_settings
from services.runtime.permissions import ROLES, Member, Role, make_users

NATS_FILE, REDIS_FILE, METRICS_FILE = "nats-users.conf", "redis-users.acl", "metrics-key"


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(UsersSettings, command="users", arguments=sys.argv[1:])
        if settings.folder.name.partition(":")[0] in ROLES:
            raise ConfigError(
                f"FOLDER {str(settings.folder)!r}: write the folder first: baton users users {settings.folder}"
            )
        members = members_of(settings.members)
        users = make_users(members, settings.folder, beside_0_1_0=settings.beside_0_1_0)
        write_secret(settings.folder / NATS_FILE, users.nats)
        write_secret(settings.folder / REDIS_FILE, users.redis)
        write_secret(settings.folder / METRICS_FILE, new_key())
    except (ConfigError, OSError) as error:
        return fail(error)
    print(f"{settings.folder / NATS_FILE}  for nats-server (deploy/nats/secure.conf includes it as users.conf)")
    print(f"{settings.folder / REDIS_FILE}  for Redis (deploy/redis/secure.conf names it as users.acl)")
    print(f"{settings.folder / METRICS_FILE}  for the gateway (--metrics-key @FILE) and Prometheus")
    for member in [*members, Member("admin")]:
        nats, redis = users.nats_file(member.user), users.redis_file(member.user)
        print(f"{member.user}: --nats-credentials {nats} --redis-credentials {redis}")
    return 0


def members_of(text: str) -> list[Member]:
    """Parse comma-separated `role:id`. A role alone has one user, named like the role. Raises ConfigError."""
    members: list[Member] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        role, colon, name = entry.partition(":")
        known: list[Role] = [one for one in ROLES if one == role and one != "admin"]
        if not known or not colon:
            raise ConfigError(f"MEMBERS {entry!r}: write ROLE:ID, with one of {', '.join(ROLES[:-1])}")
        try:
            member = Member(known[0], name)
            taken = member.user in (*ROLES, *(one.user for one in members))
        except ValueError as error:
            raise ConfigError(f"MEMBERS {entry!r}: {error}") from None
        if taken:
            raise ConfigError(f"MEMBERS {entry!r}: {name!r} is taken; choose another id")
        members.append(member)
    named = {member.role for member in members}
    return members + [Member(role) for role in ROLES if role not in named and role != "admin"]


if __name__ == "__main__":
    sys.exit(main())
