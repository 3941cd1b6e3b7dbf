"""A request being answered: its choices, and its usage."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from gateway.answers.choice import Choice, Piece
from gateway.answers.delivery import Delivery, Reader, Turn
from gateway.answers.tokenizer import ChatTokenizer
from gateway.tenants.charge import Charge


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of an answer. A prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens from a prefix cache, once a prompt
    reasoning_tokens: int = 0  # a part of the completion's


class PieceObserver(Protocol):
    """Watches an answer on its way to the client."""

    def took(self, choice: Choice, piece: Piece) -> None:
        """A piece goes to the dialect now."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer in its making."""

    id: str
    model: str
    tokenizer: ChatTokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    charge: Charge | None = None
    observer: PieceObserver | None = None
    turn: Turn = field(default_factory=Turn)  # one for all answers costs the loop less

    def cancel(self, reason: str) -> None:
        """Stop every choice on all workers, and settle the cost. Idempotent."""
        if self.charge is not None:
            self.charge.settle(self.used_tokens)
        for choice in self.choices:
            choice.generation.cancel(reason)

    @property
    def used_tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(choice.completion_tokens for choice in self.choices)

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP answer's headers: what is left of the tenant's budget."""
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
        )

    def deliver(self, reader: Reader) -> Delivery:
        """Begin to give the pieces of all choices to `reader`. The first error ends all of them."""
        delivery = Delivery(self.choices, reader, self.turn, partial(self.cancel, "answer ended"))
        delivery.begin()
        return delivery

    async def whole(self) -> list[Piece]:
        """Each choice as one piece, by index. Raises ServingError."""
        collected = _Collected(self.observer)
        delivery = self.deliver(collected)
        try:
            await collected.over
        finally:
            delivery.stop()
            self.cancel("answer ended")
        return [collected.pieces.get(choice.index, Piece(text="")) for choice in self.choices]


class _Collected:
    """Joins each choice's pieces."""

    def __init__(self, observer: PieceObserver | None) -> None:
        self.pieces: dict[int, Piece] = {}  # by their choice's index
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observer = observer

    is_ready = True

    def take(self, choice: Choice, piece: Piece) -> None:
        if self._observer is not None:
            self._observer.took(choice, piece)
        self.pieces.setdefault(choice.index, Piece(text="")).add(piece)

    def pause(self) -> None:
        """More comes."""

    def ended(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is not None:
            self.over.set_exception(error)
        else:
            self.over.set_result(None)
