"""A crowd of requests goes on one in each turn of the loop, and past the framework."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import UnavailableError
from gateway.http.application import Application
from gateway.routes.serving import Turns


async def test_of_a_crowd_one_goes_on_in_each_turn_in_order() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    went: list[tuple[int, int]] = []  # the loop's turn, who
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        if len(went) < 8:
            loop.call_soon(count)

    async def go(number: int) -> None:
        await turns.take()
        went.append((turn, number))

    count()
    await asyncio.gather(*map(go, range(8)))
    assert [number for _, number in went] == list(range(8))
    assert len({at for at, _ in went}) == 8


async def test_who_leaves_holds_nobody_up_and_who_comes_alone_does_not_wait() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.take()) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        alone = turns.take()
        with pytest.raises(StopIteration):
            alone.send(None)  # it waits for nothing


class Seen:
    """A layer that notes what passes it."""

    def __init__(self, app: ASGIApp, *, paths: list[str]) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._paths.append(scope["path"])
        scope["path"] = scope["path"].rstrip("/")
        await self._app(scope, receive, send)


async def test_all_requests_pass_the_same_layers_and_posts_of_clients_pass_by_the_frameworks_routing() -> None:
    paths, framework = list[str](), list[str]()
    errors: list[Exception] = [UnavailableError("away"), HTTPException(413)]

    async def hot(request: Request) -> Response:
        if errors:
            raise errors.pop(0)
        return PlainTextResponse("answer")

    async def refuse(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"refused {type(error).__name__}")

    async def routed(request: Request) -> Response:
        framework.append(f"{request.method} {request.url.path}")
        raise UnavailableError("away")

    served = Application([Middleware(Seen, paths=paths)], {"/hot": hot}, refuse)
    served.add_route("/cold", routed, methods=["POST"])
    served.add_route("/hot", routed, methods=["GET"])
    said: list[bytes] = []

    async def send(message: Any) -> None:
        said.append(message.get("body", b""))

    async def receive() -> Any:
        return {"type": "http.request"}

    posts = [(path, "POST") for path in ("/hot", "/hot/", "/hot", "/cold")]
    for path, method in (*posts, ("/hot", "GET"), ("/no", "GET")):
        await served({"type": "http", "path": path, "method": method, "headers": []}, receive, send)
    refused = ["UnavailableError", "HTTPExceptionanswer", "UnavailableError", "UnavailableError", "HTTPException"]
    assert b"".join(said).decode().split("refused ") == ["", *refused]
    assert paths == ["/hot", "/hot/", "/hot", "/cold", "/hot", "/no"]
    assert framework == ["POST /cold", "GET /hot"]
