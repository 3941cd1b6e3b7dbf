"""`baton keys`: what is said to people, against a gateway of this test."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import httpx
import pytest

from cli.keys.made import row_of, run
from cli.reach import Gateway
from common.settings import ConfigError
from services.runtime.running import Running


def refusing(admin_key_file: str) -> Gateway:
    stack = Running(url="http://127.0.0.1:1", pid=os.getpid(), admin_key_file=admin_key_file)
    return Gateway(url=stack.url, said="`baton up` in .baton", running=stack)


@pytest.mark.parametrize(("file", "told"), [("", True), ("admin.key", False)])
def test_a_stack_without_an_admin_key_is_to_be_started_with_one(
    file: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = httpx.Response(401, json={"error": {"message": "a valid admin key is needed: send it so"}})
    client = httpx.Client(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(lambda _: refusal))
    monkeypatch.setattr(Gateway, "client", lambda self, **_: client)
    with pytest.raises(ConfigError, match="a valid admin key is needed: BATON_ADMIN_KEY") as raised:
        run("list", Namespace(), refusing(file))
    assert ("start it again" in str(raised.value)) is told


@pytest.mark.parametrize("name", ["", "../tenants", "key_1?x", "é"])
def test_no_other_route_is_asked_to_revoke(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the id of a key"):
        run("revoke", Namespace(id=name), refusing(""))


def test_a_name_does_not_speak_to_the_terminal() -> None:
    key: dict[str, Any] = {"id": "key_1", "name": "a\x1b[2J", "admin": False, "tenant": "t", "state": "active"}
    assert "\x1b" not in row_of(key | {"created_at": 0, "expires_at": None}, [])[1]
