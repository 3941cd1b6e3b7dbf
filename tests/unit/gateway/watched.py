"""A gateway on an event loop of its own, whose every turn is timed by the processor time that it takes there."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from gateway.http.connection import BoundedProtocol

START_TIMEOUT_S = 60.0


@dataclass
class Watch:
    """The longest turn of one thread's event loop since `begin`, in seconds of processor time."""

    thread: int = 0
    longest_s: float = 0.0
    handle: asyncio.Handle | None = None

    def begin(self) -> None:
        self.longest_s, self.handle = 0.0, None

    def saw(self, took_s: float, handle: asyncio.Handle) -> None:
        """On the watched loop itself, whose time a handle's text would take: `where` makes that later."""
        if took_s > self.longest_s:
            self.longest_s, self.handle = took_s, handle

    @property
    def where(self) -> str:
        """The handle of the longest turn."""
        return repr(self.handle)


@dataclass
class Watched:
    """A running gateway and what its loop did."""

    port: int
    app: FastAPI
    watch: Watch = field(default_factory=Watch)

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", path, body, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Time the callbacks of the loop that runs in `watch.thread`."""
    run: Callable[[asyncio.Handle], Any] = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        if threading.get_ident() == watch.thread:
            watch.saw(time.thread_time() - began, handle)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


@contextlib.contextmanager
def watched(make: Callable[[], FastAPI]) -> Iterator[Watched]:
    """Serve what `make` makes in that loop. Nothing of the tests is collected meanwhile, as in a gateway's own process."""
    listener = socket.create_server(("127.0.0.1", 0))
    gc.collect()
    gc.freeze()
    started, begun = threading.Event(), list[tuple[uvicorn.Server, FastAPI]]()
    watch = Watch()

    async def serve() -> None:
        app = make()
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, log_level="critical", lifespan="off"))
        begun.append((server, app))
        watch.thread = threading.get_ident()
        asyncio.get_running_loop().call_soon(started.set)
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    with watching(watch):
        thread.start()
        try:
            assert started.wait(START_TIMEOUT_S)
            yield Watched(port=listener.getsockname()[1], app=begun[0][1], watch=watch)
        finally:
            begun[0][0].should_exit = True
            thread.join()
            gc.unfreeze()
