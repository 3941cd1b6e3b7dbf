"""The mailbox of a request: new tokens until their reader takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.errors import ServingError
from common.messages import PromptLogprobs, TokenLogprobs
from common.words import Finish


@dataclass(slots=True, kw_only=True)
class TokenEvent:
    """New tokens. `position` counts generated tokens from 0. It owns its lists."""

    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish = Finish.NONE
    cached_tokens: int = -1  # prompt tokens from a prefix cache, in the first event
    prompt_logprobs: PromptLogprobs | None = None  # first event, if asked for

    def join(self, later: TokenEvent) -> None:
        """Append the tokens."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish = later.finish

    def cut(self, count: int) -> TokenEvent:
        """Remove and return the first `count` tokens; others must remain."""
        first = replace(self, token_ids=self.token_ids[:count], logprobs=self.logprobs[:count], finish=Finish.NONE)
        self.position += count
        self.token_ids, self.logprobs = self.token_ids[count:], self.logprobs[count:]
        self.cached_tokens, self.prompt_logprobs = -1, None
        return first


class Mailbox:
    """Tokens that arrive while the reader is late are merged into one event, up to its maximum."""

    __slots__ = ("_error", "_event", "_is_closed", "_position", "_wake", "plain")

    def __init__(self) -> None:
        # Pending tokens, if there is nothing but tokens, and not the end. The reader clears it.
        self.plain: list[int] = []
        self._position = 0  # the first one's
        self._event: TokenEvent | None = None
        self._error: ServingError | None = None
        self._is_closed = False
        self._wake: Callable[[], None] = _nobody

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever something arrives, and now if something is there. It must not raise."""
        self._wake = wake
        if self.plain or self._event is not None or self._is_closed:
            wake()

    def add(self, position: int, token_id: int) -> None:
        """Add the next token, without further facts."""
        if self._event is not None:
            self._event.token_ids.append(token_id)
        else:
            if not self.plain:
                self._position = position
            self.plain.append(token_id)
        self._wake()

    def put(self, event: TokenEvent) -> None:
        """Add the next tokens."""
        self._gather()
        if self._event is None:
            self._event = event
        else:
            self._event.join(event)
        self._wake()

    def close(self, error: ServingError | None) -> None:
        """Close: no more tokens come."""
        self._gather()  # later tokens must be read after these
        self._error, self._is_closed = error, True
        self._wake()

    def take(self, at_most: int) -> TokenEvent | None:
        """Take the new tokens, or the first of them; None: none. Raises the error after the last ones."""
        self._gather()
        event = self._event
        if event is None:
            if self._error is not None:
                raise self._error
            return None
        if len(event.token_ids) > at_most:
            return event.cut(at_most)
        self._event = None
        return event

    @property
    def has_more(self) -> bool:
        """True if there is something to take: tokens, the error after them, or the end."""
        return bool(self.plain) or self._event is not None or self._is_closed

    @property
    def is_over(self) -> bool:
        """True if everything was taken, and no error is left to raise."""
        return self._is_closed and not self.plain and self._event is None and self._error is None

    def _gather(self) -> None:
        """Merge tokens that came singly into an event."""
        if self.plain:
            self._event = TokenEvent(position=self._position, token_ids=self.plain)
            self.plain = []


def _nobody() -> None:
    """No-op: nobody listens yet."""
