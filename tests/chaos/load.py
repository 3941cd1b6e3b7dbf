"""Clients that keep a number of requests in flight and write down what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from tests.chaos.asks import Ask, Oracle, Seen, ask

DEADLINE_S = 30.0
ANSWERED_WITHIN_S = 120.0
GRACE_S = 10.0  # past its deadline, for a gateway, its clients and the clock that share two cores
BACK_OFF_S = 0.25  # of a client that was refused; Retry-After would make a short test idle


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request as its client saw it. Instants are `time.monotonic()`."""

    ask: Ask
    started: float
    ended: float = 0.0
    status: int = 0
    retry_after: str = ""
    choices: dict[int, Seen] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)  # of a stream's events
    is_whole: bool = False  # the answer was there to its last byte
    left: bool = False  # the client hung up, as it meant to
    error: str = ""  # the code of an explicit error
    broken: str = ""  # the connection ended without a word
    overdue: bool = False  # nothing until the client gave up, past the deadline

    def of(self, index: int) -> Seen:
        """What was seen of a choice, to be added to."""
        return self.choices.setdefault(index, Seen(tokens=[], text=""))


class Load:
    """`streams` clients, each with one request at a time, from entering to `stop`."""

    def __init__(
        self,
        url: str | Callable[[], str],
        oracle: Oracle,
        *,
        streams: int,
        first: int = 0,
        deadline_s: float = DEADLINE_S,
        rate: float = math.inf,
        **asking: Any,
    ) -> None:
        """`url`: the gateway, or what says which one a request goes to, as a load balancer would.

        `rate`: requests a second at most, of all clients together.
        """
        self.outcomes: list[Outcome] = []
        self.in_flight: set[int] = set()
        self._choose = url if callable(url) else lambda: url
        self._oracle = oracle
        self._streams = streams
        self._numbers: Iterator[int] = itertools.count(first)
        self._asking = {"deadline_s": deadline_s, **asking}
        self._stopping = asyncio.Event()
        self._pause_s, self._next_at = 1 / rate, 0.0
        self._progress = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._clients = [asyncio.create_task(self._client()) for _ in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for client in self._clients:
                client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=error is not None)

    async def stop(self) -> list[Outcome]:
        """Ask no more; return all outcomes once what is in flight has ended, each within its deadline."""
        self._stopping.set()
        await asyncio.gather(*self._clients)
        return self.outcomes

    async def until_answered(self, count: int) -> None:
        """Wait for `count` more requests to end."""
        goal = len(self.outcomes) + count
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            while len(self.outcomes) < goal:
                self._progress.clear()
                await self._progress.wait()

    async def _client(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients: dict[str, httpx.AsyncClient] = {}
            while await self._turn():
                url = self._choose()
                if url not in clients:
                    opened = httpx.AsyncClient(base_url=url, timeout=None, verify=False)  # CAs take 25 ms to read
                    clients[url] = await stack.enter_async_context(opened)
                outcome = await request(clients[url], ask(next(self._numbers), self._oracle, **self._asking))
                self.outcomes.append(outcome)
                self._progress.set()
                if outcome.error or outcome.broken:
                    await asyncio.sleep(BACK_OFF_S)

    async def _turn(self) -> bool:
        """Wait until the next request may be sent; False when none may be any more."""
        now = time.monotonic()
        self._next_at = max(now, self._next_at) + self._pause_s
        if self._pause_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_at - self._pause_s - now):
                    await self._stopping.wait()
        return not self._stopping.is_set()


async def request(client: httpx.AsyncClient, asked: Ask, outcome: Outcome | None = None) -> Outcome:
    """Send one request and see it to its end, whatever that is; what is seen meanwhile is in `outcome`."""
    outcome = outcome or Outcome(ask=asked, started=time.monotonic())
    try:
        async with asyncio.timeout(asked.deadline_s + GRACE_S):
            if asked.streamed:
                await _stream(client, outcome)
            else:
                await _whole(client, outcome)
    except TimeoutError:
        outcome.overdue = True
    except (httpx.HTTPError, OSError) as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    outcome.ended = time.monotonic()
    return outcome


async def _whole(client: httpx.AsyncClient, outcome: Outcome) -> None:
    posting = client.post("/v1/completions", json=outcome.ask.body)
    if outcome.ask.leaves_after is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await posting
        outcome.left = True
        return
    response = await posting
    _status(outcome, response)
    answer = response.json()
    if not _failed(outcome, answer):
        for choice in answer["choices"]:
            outcome.choices[choice["index"]] = Seen(
                tokens=choice["token_ids"], text=choice["text"], finish=choice["finish_reason"]
            )
        outcome.is_whole = True


async def _stream(client: httpx.AsyncClient, outcome: Outcome) -> None:
    async with client.stream("POST", "/v1/completions", json=outcome.ask.body) as response:
        _status(outcome, response)
        if response.status_code != 200:
            _failed(outcome, json.loads(await response.aread()))
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                outcome.is_whole = True
            elif line.startswith("data: ") and not _event(outcome, json.loads(line.removeprefix("data: "))):
                return
    if not (outcome.is_whole or outcome.error):
        outcome.broken = "the stream ended without [DONE] or an error"


def _event(outcome: Outcome, event: dict[str, Any]) -> bool:
    """Take one event; False when the client hangs up here."""
    if _failed(outcome, event):
        return True
    outcome.arrivals.append(time.monotonic())
    for choice in event["choices"]:
        seen = outcome.of(choice["index"])
        seen.tokens += choice["token_ids"]
        seen.text += choice["text"]
        seen.finish = choice["finish_reason"] or ""
    leaves_after = outcome.ask.leaves_after
    outcome.left = leaves_after is not None and len(outcome.of(0).tokens) >= leaves_after
    return not outcome.left


def _status(outcome: Outcome, response: httpx.Response) -> None:
    outcome.status = response.status_code
    outcome.retry_after = response.headers.get("retry-after", "")


def _failed(outcome: Outcome, answer: dict[str, Any]) -> bool:
    if "error" not in answer:
        return False
    outcome.error = str(answer["error"]["code"])
    return True
