"""A request being answered: its choices, merged into one sequence of pieces, and its usage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from gateway.answers.choice import Choice, Piece
from gateway.answers.tokenizer import ChatTokenizer
from gateway.tenants.charge import Charge

PIECES_PER_TURN = 64  # then other answers get a turn
MAX_BUFFERED_PIECES = 256  # a slow client's stream waits beyond this


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

    async def cancel(self, reason: str) -> None:
        """Stop every choice on all workers, and settle the cost. Idempotent."""
        if self.charge is not None:
            self.charge.settle(self.used_tokens)
        # One after the other: nothing here waits, so it completes even while this task is being cancelled.
        for choice in self.choices:
            await choice.generation.cancel(reason)

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

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """The pieces of all choices as they come. The first error ends all of them."""
        observer = self.observer
        try:
            pieces = self._only(self.choices[0]) if len(self.choices) == 1 else self._merged()
            async with contextlib.aclosing(pieces):
                async for item in pieces:
                    if observer is not None:
                        observer.took(*item)
                    yield item
        finally:
            await self.cancel("answer ended")

    async def whole(self) -> list[Piece]:
        """Each choice as one piece, by index. Raises ServingError."""
        merged = {choice.index: Piece(text="") for choice in self.choices}
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for choice, piece in pieces:
                merged[choice.index].add(piece)
        return [piece for _, piece in sorted(merged.items())]

    async def _only(self, choice: Choice) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Without a task between a token and its text. An answer that is far ahead lets others have their turn."""
        count = 0
        async with contextlib.aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                yield choice, piece
                count += 1
                if count % PIECES_PER_TURN == 0:
                    await asyncio.sleep(0)

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        queue: asyncio.Queue[tuple[Choice, Piece] | BaseException | None] = asyncio.Queue(MAX_BUFFERED_PIECES)

        async def pump(choice: Choice) -> None:
            try:
                async for piece in choice.pieces():
                    await queue.put((choice, piece))
                await queue.put(None)
            except Exception as error:  # our own mistakes, too: the reader must hear of them
                await queue.put(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
