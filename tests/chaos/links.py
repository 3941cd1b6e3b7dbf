"""A TCP proxy for each link of a process to NATS or Redis: real bytes pass through it until the link is hurt.

Cut: connections end, and new ones end at once. Held: connections stay and carry nothing, as with a pulled cable; what was sent
arrives when the link is whole again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from tests.chaos.cluster import ChaosCluster, FaultDidNotHappenError

Harm = Literal["cut", "hold"]
PIECE_BYTES = 64 << 10


class Link:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`upstream`."""

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self._upstream = upstream
        self._traces = 0  # connections ended and pieces held since the last harm
        self._is_cut = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        """End all connections, and listen no more."""
        if self._listener is not None:
            self._listener.close()
        self._flows.set()
        self._abort_all()

    async def harm(self, harm: Harm) -> None:
        """Cut it, or hold what it carries, until `heal`."""
        self._traces = 0
        if harm == "cut":
            self._is_cut = True
            self._abort_all()
        else:
            self._flows.clear()

    async def heal(self) -> None:
        """Make it whole. Raises FaultDidNotHappenError when nobody had used it meanwhile."""
        self._is_cut = False
        self._flows.set()
        if not self._traces:
            raise FaultDidNotHappenError("the link that was cut carried nothing")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            self._writers.add(writer)
            try:
                if self._is_cut:
                    self._traces += 1
                    return
                server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
                self._writers.add(server_writer)
                try:
                    if not self._is_cut:  # it may have been cut while the server was asked
                        await asyncio.gather(self._pump(reader, server_writer), self._pump(server_reader, writer))
                finally:
                    self._forget(server_writer)
            finally:
                self._forget(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on in one direction until an end; the other direction then ends as well."""
        try:
            while piece := await reader.read(PIECE_BYTES):
                if not self._flows.is_set():
                    self._traces += 1
                    await self._flows.wait()
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    def _abort_all(self) -> None:
        self._traces += len(self._writers)
        for writer in self._writers:
            writer.transport.abort()


class LinkedCluster(ChaosCluster):
    """`ChaosCluster` in which each service reaches NATS and Redis over links of its own.

    They have a thread: while the test compares tokens for a second or two, a link in its event loop would stand still.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._links: dict[tuple[str, str], Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def start(self, name: str) -> None:
        """Start a service behind its links."""
        if not self._links:
            self._thread.start()
            self._stack.push_async_callback(self._end_links)
        for server in (self.nats, self.redis):
            if (name, server.name) not in self._links:
                link = self._links[name, server.name] = Link(server.port)
                await self._there(link.start())
        await super().start(name)

    async def hurt(self, name: str, server: str, harm: Harm, seconds: float) -> None:
        """Harm the link of `name` to `server` for `seconds`, which are the fault itself."""
        link = self._links[name, server]
        await self._there(link.harm(harm))
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._there(link.heal())
        self.faults.append(f"{harm} {name} - {server} {seconds:g} s")

    def _address(self, server: str, user: str) -> str:
        return f"{server}://127.0.0.1:{self._links[user, server].port}"

    async def _there(self, call: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    async def _end_links(self) -> None:
        await self._there(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 5)
        self._loop.close()

    async def _cancel_all(self) -> None:
        for link in self._links.values():
            link.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Part:
    """A fault: the link between `server` and the gateway, or the busiest worker of `role`, is harmed for `seconds`."""

    role: str
    server: str
    harm: Harm
    seconds: float

    def __str__(self) -> str:
        return f"{self.harm} {self.role} - {self.server} {self.seconds:g} s"

    async def __call__(self, cluster: ChaosCluster) -> str:
        assert isinstance(cluster, LinkedCluster)
        name = await cluster.busiest(self.role) if self.role in ("prefill", "decode") else self.role
        await cluster.hurt(name, self.server, self.harm, self.seconds)
        return str(self)
