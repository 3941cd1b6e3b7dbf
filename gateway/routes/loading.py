"""A stream that begins before its model is loaded: comments say how far that is, then the answer follows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from common.errors import ServingError
from gateway.http.exchange import BodyWriter
from gateway.http.problem import INTERNAL, Problem, problem_of
from gateway.routes.door import Begun, Loading

log = logging.getLogger("baton.http")

TELL_EACH_S = 1.0


class Stream(Protocol):
    """The stream of an answer that could start."""

    def begin(self, writer: BodyWriter) -> None: ...

    def close(self) -> None: ...


class LoadingStream:
    """Writes comments until the answer starts, and hands its connection on then."""

    def __init__(self, loading: Loading, make: Callable[[Begun], Stream], refuse: Callable[[Problem], bytes]) -> None:
        """`refuse`: the event that ends a stream whose answer can't start."""
        self._loading = loading
        self._make = make
        self._refuse = refuse
        self._running: asyncio.Task[None] | None = None
        self._stream: Stream | None = None

    def begin(self, writer: BodyWriter) -> None:
        self._running = asyncio.create_task(self._run(writer))

    def close(self) -> None:
        """The connection is done with it."""
        if self._running is not None:
            self._running.cancel()
        if self._stream is not None:
            self._stream.close()

    async def _run(self, writer: BodyWriter) -> None:
        starting = asyncio.create_task(self._loading.start())
        try:
            while not starting.done():
                writer.write(b": " + self._loading.said().replace("\n", " ").encode(errors="replace") + b"\n\n")
                await asyncio.wait([starting], timeout=TELL_EACH_S)
            begun = starting.result()
        except asyncio.CancelledError:
            if starting.done() and isinstance(begun := starting.result(), Begun):
                begun.answer.cancel("client disconnected")
            raise
        except ServingError as error:
            writer.end(self._refuse(problem_of(error)))
            return
        except Exception:
            log.exception("http.stream_crashed")
            writer.end(self._refuse(INTERNAL))
            return
        finally:
            if not starting.done():
                starting.cancel()
        assert isinstance(begun, Begun)  # what needs no tokens is told at once
        self._stream = self._make(begun)
        self._stream.begin(writer)
