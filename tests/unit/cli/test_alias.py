"""`baton alias`: what it asks of a gateway, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cli.alias.__main__ import _parser, run

SHARES = [{"model": "old", "percent": 95.0}, {"model": "new", "percent": 5.0}]


class Answering:
    """A gateway that notes requests, and answers each with the same alias."""

    url = "http://gateway"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []

    @contextmanager
    def client(self, *, timeout_s: float) -> Iterator[httpx.Client]:
        def answer(request: httpx.Request) -> httpx.Response:
            body = json.loads(request.content) if request.content else None
            self.asked.append((request.method, request.url.raw_path.decode(), body))
            told: dict[str, Any] = {"name": "chat", "shares": SHARES}
            return httpx.Response(200, json=told | {"aliases": [told], "models": ["old", "new"]})

        with httpx.Client(base_url=self.url, transport=httpx.MockTransport(answer)) as client:
            yield client


def typed(*arguments: str) -> tuple[list[str], list[tuple[str, str, Any]]]:
    gateway = Answering()
    return run(_parser().parse_args(arguments), gateway), gateway.asked


def test_shares_are_set_listed_and_put_back() -> None:
    line = ["chat = old@95%, new@5%"]
    assert typed("set", "chat", "old@95%", "new@5%") == (
        line,
        [("POST", "/admin/aliases", {"name": "chat", "shares": SHARES})],
    )
    assert typed("rollback", "chat") == (line, [("POST", "/admin/aliases/rollback", {"name": "chat"})])
    assert typed("list") == (line, [("GET", "/admin/aliases", None)])
    assert typed("rm", "org/x") == (["org/x is dropped"], [("DELETE", "/admin/aliases/org%2Fx", None)])


def test_one_model_has_all() -> None:
    _, asked = typed("set", "chat", "new")
    assert asked[0][2]["shares"] == [{"model": "new", "percent": 100.0}]
    with pytest.raises(ValueError, match="is not like MODEL@5%"):
        typed("set", "chat", "new", "old@5%")
