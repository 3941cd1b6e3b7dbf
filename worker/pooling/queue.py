"""Inputs that wait for a pass, of all requests: passes are filled by tokens, in the order of arrival. Without clock and I/O."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.blocks import unpack_tokens
from common.errors import InvalidRequestError, ServingError
from common.messages import Pool
from engine.pooling.engine import PoolingInput
from modelfiles.pooling import MAXSIM


@dataclass(slots=True, eq=False)
class Asked:
    """A message, and what is known of its inputs."""

    inputs: list[PoolingInput]
    come_at: float
    until: float  # its deadline
    done: asyncio.Future[None]
    rows: list[torch.Tensor | None] = field(default_factory=list)
    began_at: float = 0.0  # its first pass; 0: none yet
    queue_s: float = 0.0
    compute_s: float = 0.0
    pass_tokens: int = 0
    found: int = 0  # tokens in prefixes that others have

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.inputs)

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) for one in self.inputs)

    def fail(self, error: ServingError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def take(self, at: int, rows: torch.Tensor) -> None:
        self.rows[at] = rows
        if not self.done.done() and all(each is not None for each in self.rows):
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Place:
    """One input of a message."""

    asked: Asked
    at: int

    @property
    def input(self) -> PoolingInput:
        return self.asked.inputs[self.at]


class Queue:
    """The waiting inputs."""

    def __init__(self) -> None:
        self._waiting = deque[Place]()
        self.tokens = 0
        self.dropped = 0  # inputs that nobody waited for any more

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, asked: Asked) -> None:
        self._waiting.extend(Place(asked, at) for at in range(len(asked.inputs)))
        self.tokens += asked.tokens

    def take(self, most_tokens: int) -> list[Place]:
        """The next inputs of at most so many tokens together, one at least. Those of ended requests are dropped."""
        found, size = list[Place](), 0
        while self._waiting:
            next_one = self._waiting[0]
            length = len(next_one.input.tokens)
            if next_one.asked.done.done():
                self._waiting.popleft()
                self.tokens -= length
                self.dropped += 1
                continue
            if found and size + length > most_tokens:
                break
            self._waiting.popleft()
            self.tokens -= length
            size += length
            found.append(next_one)
        return found


def inputs_of(
    message: Pool, *, vocab_size: int, longest: int, works: Sequence[str], size: int, tasks: Sequence[str] = ()
) -> list[PoolingInput]:
    """The inputs of a message. Raises InvalidRequestError: no gateway of ours sends what this refuses."""
    if message.work not in works:
        raise InvalidRequestError(
            f"work {message.work!r:.40} is not this model's: {', '.join(works)} are", param="model"
        )
    if message.adapter and message.adapter not in tasks:
        raise InvalidRequestError(
            f"adapter {message.adapter!r:.40} is not this model's: {', '.join(tasks) or 'it has none'}", param="model"
        )
    if message.seconds and len(message.seconds) != len(message.inputs):
        raise InvalidRequestError(f"{len(message.seconds)} second texts of {len(message.inputs)} inputs", param="input")
    if message.dimensions > size:
        raise InvalidRequestError(f"dimensions: a vector has {size}, not {message.dimensions}", param="dimensions")
    seconds = message.seconds or [0] * len(message.inputs)
    if message.work == MAXSIM:
        _check_pairs(message, seconds, longest)
        longest *= 2
    return [
        PoolingInput(
            tokens=_tokens(packed, vocab_size=vocab_size, longest=longest),
            work=message.work,
            second=second,
            skipped=message.skipped,
            dimensions=message.dimensions,
            is_raw=message.is_raw,
            adapter=message.adapter,
            salt=message.salt,
        )
        for packed, second in zip(message.inputs, seconds, strict=True)
    ]


def _check_pairs(message: Pool, seconds: Sequence[int], longest: int) -> None:
    """Raises InvalidRequestError unless each input is a query and a document."""
    for packed, second in zip(message.inputs, seconds, strict=True):
        if not 0 < second <= longest or not 0 < len(packed) // 4 - second <= longest:
            raise InvalidRequestError(
                f"a query of {second} of {len(packed) / 4:g} tokens: both sides have 1 to {longest}", param="input"
            )


def _tokens(packed: bytes, *, vocab_size: int, longest: int) -> list[int]:
    if not packed or len(packed) % 4 or len(packed) > 4 * longest:
        raise InvalidRequestError(
            f"an input has {len(packed) / 4:g} tokens, and 1 to {longest} are possible", param="input"
        )
    tokens = unpack_tokens(packed)
    if max(tokens) >= vocab_size:
        raise InvalidRequestError(f"token {max(tokens)} is not in the vocabulary of {vocab_size}", param="input")
    return tokens
