"""A request being answered: its choices, the delivery of their pieces to a reader, and its usage.

A reader gets, once a turn of the event loop, all that came in it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from common.errors import RateLimitedError
from gateway.answers.choice import Choice, Piece
from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.timeline import STOP_STRING
from gateway.tenants.budgets import UNLIMITED, Budgets, Grant
from gateway.tenants.tenants import Tenant

_settling: set[asyncio.Task[Any]] = set()  # an unreferenced task may be collected
_WHAT = {
    "requests": ("requests a minute", "requests_per_minute"),
    "tokens": ("tokens a minute", "tokens_per_minute"),
    "concurrent": ("requests at a time", "max_concurrent"),
}
log = logging.getLogger("baton.answers")

MAX_TOKENS = 64  # tokens of a choice and turn, so that other answers progress


class Charge:
    """One answer's charge."""

    def __init__(self, budgets: Budgets, grant: Grant) -> None:
        self._budgets = budgets
        self._grant = grant
        self._open = True
        self.headers = _headers(grant)

    def settle(self, used: int | None) -> None:
        """Settle the charge with the tokens used; None: it was not admitted. Idempotent, does not wait."""
        if self._open:
            self._open = False
            task = asyncio.ensure_future(self._budgets.settle(self._grant, used=used))
            _settling.add(task)
            task.add_done_callback(_settling.discard)


async def charge(
    budgets: Budgets, tenant: Tenant, request_id: str, *, tokens: int, ttl_s: float, used: Callable[[], int] = int
) -> Charge | None:
    """Charge at most `tokens`, of which `used()` are used so far; None for a tenant without limits. Raises RateLimitedError."""
    if tenant.limits == UNLIMITED:
        return None
    grant = await budgets.take(tenant.name, tenant.limits, request_id, tokens=tokens, ttl_s=ttl_s, used=used)
    if grant.refused:
        text, field = _WHAT[grant.refused]
        raise RateLimitedError(
            f"the limit of {getattr(tenant.limits, field)} {text} of this API key is reached; try again later",
            what=grant.refused,
            retry_after_s=grant.retry_after_s,
            headers=_headers(grant),
        )
    return Charge(budgets, grant)


def _headers(grant: Grant) -> dict[str, str]:
    """OpenAI's `x-ratelimit-…` headers for the configured limits."""
    headers = {}
    for what, limit, left, full_s in (
        ("requests", grant.limits.requests_per_minute, grant.remaining_requests, grant.full_requests_s),
        ("tokens", grant.limits.tokens_per_minute, grant.remaining_tokens, grant.full_tokens_s),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(left)
            headers[f"x-ratelimit-reset-{what}"] = duration(full_s)
    return headers


def duration(seconds: float) -> str:
    """A duration in OpenAI's form: 20ms, 7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of an answer. A prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens from a prefix cache, once a prompt
    reasoning_tokens: int = 0  # a part of the completion's
    drafted: int = 0  # tokens that workers verified
    accepted: int = 0  # part of drafted

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


class PieceObserver(Protocol):
    """Watches an answer on its way to the client."""

    def took(self, choice: Choice, piece: Piece) -> None:
        """Observe a piece on its way to the dialect."""

    def went_on(self, choice: Choice) -> None:
        """Observe a text-only piece after the first one."""


class Reader(Protocol):
    """The receiver of an answer's pieces. An exception in it ends the answer with that error."""

    @property
    def is_ready(self) -> bool:
        """True if it takes pieces now; otherwise it calls `Delivery.wake` later."""
        ...

    @property
    def takes_text(self) -> bool:
        """True if `say` may be called."""
        ...

    def say(self, choice: Choice, text: str, token_ids: Sequence[int]) -> None:
        """Take a text-only piece after the first, reasoning if `choice.is_reasoning`. The list is lent."""
        ...

    def take(self, choice: Choice, piece: Piece) -> None:
        """Take the next piece of a choice: its new tokens of this turn, or the first of them."""
        ...

    def pause(self) -> None:
        """Note that this turn has no more pieces."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Note that nothing more comes. Called once, instead of the last `pause`."""
        ...


class Turn:
    """Runs deliveries at the end of an event-loop turn, after the turn's frames were read."""

    def __init__(self) -> None:
        self._due: list[Delivery] = []

    def add(self, delivery: Delivery) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._end)
        self._due.append(delivery)

    def _end(self) -> None:
        due, self._due = self._due, []
        for delivery in due:
            delivery.run()


class Delivery:
    """Delivers the pieces of all choices to one reader until they end, one fails, or the reader leaves."""

    __slots__ = ("_close", "_context", "_is_due", "_is_over", "_open", "_reader", "_takes_text", "_turn")

    def __init__(self, choices: Sequence[Choice], reader: Reader, turn: Turn, close: Callable[[], None]) -> None:
        """`close` is called before the reader hears of the end."""
        self._open = list(choices)
        self._reader = reader
        self._takes_text = reader.takes_text
        self._turn = turn
        self._close = close
        self._is_due = self._is_over = False
        self._context = copy_context()  # the reader's trace, not that of a worker's frame

    def begin(self) -> None:
        """Subscribe to the choices."""
        for choice in self._open:
            choice.generation.mailbox.listen(self.wake)

    def wake(self) -> None:
        """Schedule a delivery: there may be something to read."""
        if not self._is_due:
            self._is_due = True
            self._turn.add(self)

    def stop(self) -> None:
        """Stop delivering to the reader."""
        self._is_over = True

    def run(self) -> None:
        """Deliver the pieces of this turn."""
        self._is_due = False
        reader = self._reader
        if self._is_over or not reader.is_ready:
            return
        try:
            for choice in self._open if len(self._open) == 1 else tuple(self._open):
                plain = choice.generation.mailbox.plain
                if plain and self._takes_text and len(plain) <= MAX_TOKENS and (text := choice.plain(plain)):
                    reader.say(choice, text, plain)
                    plain.clear()
                else:
                    self._context.run(self._read, choice)
            if self._open:
                reader.pause()
                return
        except Exception as error:
            self._context.run(self._end, error)
        else:
            self._context.run(self._end, None)

    def _read(self, choice: Choice) -> None:
        """Read the pieces. Raises the error that ends the answer."""
        generation = choice.generation
        event = generation.mailbox.take(MAX_TOKENS)
        if event is not None:
            piece = choice.take(event)
            self._reader.take(choice, piece)
            if piece.finish:
                self._open.remove(choice)
                if not event.finish:
                    generation.cancel(STOP_STRING)
            elif generation.mailbox.has_more:
                self.wake()
        elif generation.mailbox.is_over:
            self._open.remove(choice)

    def _end(self, error: Exception | None) -> None:
        self._is_over = True
        for step in (self._close, partial(self._reader.ended, error)):
            try:
                step()
            except Exception:  # it ends itself: other answers of this turn must not suffer
                log.exception("answer.end_failed")


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer in progress."""

    id: str
    model: str  # the client's name of it
    own_model: str  # the model's own name, for metrics and traces
    tokenizer: ChatTokenizer
    weights: str = ""  # their fingerprint; "": unknown
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    charge: Charge | None = None
    observer: PieceObserver | None = None
    turn: Turn = field(default_factory=Turn)  # one shared by all answers costs the loop less
    on_end: list[Callable[[Answer], None]] = field(default_factory=list)  # may be called more than once

    def cancel(self, reason: str) -> None:
        """Stop every choice on all workers, and settle the cost. Idempotent."""
        for ended in tuple(self.on_end):
            ended(self)
        if self.charge is not None:
            self.charge.settle(self.used_tokens)
        for choice in self.choices:
            choice.generation.cancel(reason)

    @property
    def used_tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(choice.completion_tokens for choice in self.choices)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP answer: the tenant's remaining budget."""
        return self.charge.headers if self.charge is not None else {}

    @property
    def choices_per_prompt(self) -> int:
        return max(1, len(self.choices) // len(self.prompts))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in self.choices[:: self.choices_per_prompt]),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
            drafted=sum(choice.generation.timeline.frames.drafted for choice in self.choices),
            accepted=sum(choice.generation.timeline.frames.accepted for choice in self.choices),
        )

    def deliver(self, reader: Reader) -> Delivery:
        """Start delivering the pieces of all choices to `reader`. The first error ends all of them."""
        delivery = Delivery(self.choices, reader, self.turn, partial(self.cancel, "answer ended"))
        delivery.begin()
        return delivery

    async def whole(self, each: Callable[[Choice, Piece], None] | None = None) -> list[Piece]:
        """Each choice as one piece, by index. `each` sees the joined pieces in order. Raises ServingError."""
        collected = _Collected(self.observer, each)
        delivery = self.deliver(collected)
        try:
            await collected.over
        finally:
            delivery.stop()
            self.cancel("answer ended")
        return [collected.pieces.get(choice.index, Piece(text="")) for choice in self.choices]


class _Collected:
    """Joins each choice's pieces."""

    is_ready = True

    def __init__(self, observer: PieceObserver | None, each: Callable[[Choice, Piece], None] | None) -> None:
        self.takes_text = each is None
        self.pieces: dict[int, Piece] = {}  # by their choice's index
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observer = observer
        self._each = each

    def say(self, choice: Choice, text: str, token_ids: Sequence[int]) -> None:
        if self._observer is not None:
            self._observer.went_on(choice)
        piece = self.pieces[choice.index]
        if choice.is_reasoning:
            piece.reasoning += text
        else:
            piece.text += text
        piece.token_ids += token_ids

    def take(self, choice: Choice, piece: Piece) -> None:
        if self._observer is not None:
            self._observer.took(choice, piece)
        if self._each is not None:
            self._each(choice, piece)
        self.pieces.setdefault(choice.index, Piece(text="")).add(piece)

    def pause(self) -> None:
        """More comes."""

    def ended(self, error: Exception | None) -> None:
        settle(self.over, error)


def settle(over: asyncio.Future[None], error: Exception | None) -> None:
    """Wake a waiting reader, unless it was woken already."""
    if over.done():
        return
    if error is not None:
        over.set_exception(error)
    else:
        over.set_result(None)
