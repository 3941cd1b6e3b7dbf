"""What answers are made of in tests: a mailbox that a test fills, events as workers send them, a socket that keeps what came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.messages import Grammar, TokenLogprobs
from common.words import Finish
from gateway.request.spec import Mailbox, TokenEvent
from gateway.request.timeline import Timeline


class Generation:
    """A mailbox, and why it was cancelled."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.cancelled: list[str] = []
        self.timings: dict[str, float] = {}
        self.timeline = Timeline(request_id="r", received_at=0.0, submitted_at=0.0, prompt_tokens=1)

    def cancel(self, reason: str) -> None:
        if not self.mailbox.is_over and not self.cancelled:
            self.cancelled.append(reason)
            self.mailbox.close(None)

    def called(self) -> None: ...

    def end_reasoning(self, grammar: Grammar) -> bool:
        return False


@dataclass
class Socket:
    """What was written, a part for each write; it may stop reading."""

    parts: list[bytes] = field(default_factory=list)
    idle_event: bytes = b""
    is_ended: bool = False
    reads: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.reads.set()

    @property
    def is_read(self) -> bool:
        return self.reads.is_set()

    async def read(self) -> None:
        await self.reads.wait()

    def write(self, data: bytes) -> None:
        assert not self.is_ended
        self.parts.append(data)

    def end(self, data: bytes) -> None:
        self.write(data)
        self.is_ended = True

    @property
    def events(self) -> list[Any]:
        lines = b"".join(self.parts).split(b"\n\n")
        return [json.loads(line[6:]) for line in lines if line and line != b"data: [DONE]"]


def put(mailbox: Mailbox, event: TokenEvent) -> None:
    """As frames come: a token of which there is nothing else to say comes as a number."""
    if len(event.token_ids) > 1 or event.finish or event.logprobs or event.cached_tokens >= 0:
        mailbox.put(event)
    else:
        mailbox.add(event.position, event.token_ids[0])


def cut(
    ids: Sequence[int], sizes: Sequence[int], *, finish: Finish = Finish.STOP, logprobs: bool = False
) -> list[TokenEvent]:
    """`ids` as events of these sizes, in turn."""
    events: list[TokenEvent] = []
    at = 0
    while at < len(ids):
        new = list(ids[at : at + sizes[len(events) % len(sizes)]])
        tell = [TokenLogprobs(logprob=-token / 1000, top_ids=[token], top_logprobs=[-0.1]) for token in new]
        is_last = at + len(new) == len(ids)
        events.append(
            TokenEvent(
                position=at,
                token_ids=new,
                logprobs=tell if logprobs else [],
                finish=finish if is_last else Finish.NONE,
                cached_tokens=0 if at == 0 else -1,
            )
        )
        at += len(new)
    return events


async def turn_over() -> None:
    """What is due at the end of this turn is done."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
