"""Keys made through a running gateway's admin routes and valid at all gateways."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import Field

from cli.reach import ClientOptions, Gateway
from common.log import printable
from common.settings import ConfigError

COLUMNS = ("id", "name", "tenant", "state", "created", "expires", "used in 7 days")


class KeysSettings(ClientOptions):
    """`baton keys create`, `list`, `revoke`: keys of a running gateway."""

    admin_key: str = Field("", description="an administrator's key; empty: that of `baton up`, or --api-key")

    def administered(self) -> Gateway:
        """The gateway with an administrator's key, which is never sent to OPENAI_BASE_URL."""
        gateway = self.gateway(admin=True)
        is_ours = gateway.said != "OPENAI_BASE_URL"
        return replace(gateway, api_key=self.admin_key) if self.admin_key and is_ours else gateway


def run(action: str, given: Namespace, gateway: Gateway) -> str:
    """Return the text to print. Raises ConfigError with the gateway's message, httpx.HTTPError if it doesn't answer."""
    if action == "create":
        body = {"name": given.name, "admin": given.admin}
        body |= {} if given.admin else {"tenant": given.tenant}
        body |= {"expires_in_days": given.expires_days} if given.expires_days else {}
        made = ask(gateway, "POST", "/admin/keys", body)
        return as_json(made) if given.print_json else f"{made['id']}, shown only here: {made['key']}"
    if action == "revoke":
        if not re.fullmatch(r"[\w-]+", given.id, re.ASCII):
            raise ConfigError(f"{given.id[:80]!r} is not the id of a key: see `baton keys list`")
        revoked = ask(gateway, "POST", f"/admin/keys/{given.id}/revoke")
        return as_json(revoked) if given.print_json else f"{given.id} is revoked"
    listed = ask(gateway, "GET", "/admin/keys")["keys"]
    used = ask(gateway, "GET", "/admin/usage?hours=168")["keys"]
    if given.print_json:
        return as_json({"keys": listed, "usage": used})
    return table([row_of(key, used) for key in listed if given.all or key["state"] == "active"])


def ask(gateway: Gateway, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Call an admin route. Raises ConfigError unless the status is 200."""
    with gateway.client(timeout_s=10) as client:
        answer = client.request(method, path, json=body)
    if answer.status_code == 200:
        return answer.json()
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status_code}"
    if answer.status_code == 401:
        message = f"{message.partition(': send')[0]}: {_lacks(gateway)}"
    raise ConfigError(f"{gateway.url}: {message}")


def _lacks(gateway: Gateway) -> str:
    """Explain where to get an admin key. A `baton up` knows if it was given one; `--tenants` may define others."""
    says = "BATON_ADMIN_KEY, or --admin-key @FILE, says it"
    if gateway.running is None or gateway.running.admin_key_file:
        return says
    return f"{says}; {gateway.said} was started without one: start it again with either"


def row_of(key: dict[str, Any], used: list[dict[str, Any]]) -> tuple[str, ...]:
    own = [one for one in used if one["key"] == key["id"]]
    requests, tokens = (sum(sum(one[name]) for one in own for name in names) for names in NAMES)
    return (
        key["id"],
        printable(key["name"]),
        "admin" if key["admin"] else key["tenant"],
        key["state"],
        day(key["created_at"]),
        day(key["expires_at"]),
        f"{requests} requests, {tokens} tok" if own else "-",
    )


NAMES = (("requests",), ("prompt_tokens", "completion_tokens"))


def day(unix: int | None) -> str:
    return datetime.fromtimestamp(unix).strftime("%Y-%m-%d") if unix else "-"


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (COLUMNS, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2)
