"""Who may have killed its worker: those that were there are tried again so that the guilty one takes nobody along.

A prompt that was being computed when its worker died is the likeliest cause. Such requests, and few others, are tried again one
after the other; each is let go when it got further than where its worker died. Who kills another worker, alone, is given up.
"""

from __future__ import annotations

import asyncio

from gateway.owner import Phase, RequestState

FEW = 4  # decoding sequences of a dead worker that are worth trying one by one: more would make their clients wait
CLEARED_TOKENS = 4  # a decoding sequence has got so far beyond the place
LONGEST_WAIT_S = 1.0  # then a suspect goes as well: its client is waiting, and the one before may be a long prompt


class Suspects:
    """Counts deaths, and lets one suspect after the other go. Not for requests that only waited in a queue."""

    def __init__(self) -> None:
        self._alone: RequestState | None = None
        self._changed = asyncio.Event()

    def convict(self, state: RequestState, *, others: int) -> bool:
        """The worker that worked on `state`, and on `others` besides, died. Whether that is the second one."""
        self.forget(state)
        state.deaths += 1
        computing = state.phase is Phase.CLAIMED
        state.is_suspect = computing or state.deaths > 1 or others < FEW
        state.clear_at = state.next_position + (1 if computing and state.deaths == 1 else CLEARED_TOKENS)
        return state.deaths > 1 and state.was_alone

    async def alone(self, state: RequestState) -> None:
        """Return when no other suspect is being tried, or after a second; at once for who is none."""
        state.was_alone = state.is_suspect
        if not state.is_suspect:
            return
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                while self._alone is not None and not state.is_over:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:  # neither is alone now: another death says nothing of either
            state.was_alone = False
            if self._alone is not None:
                self._alone.was_alone = False
            return
        if not state.is_over:
            self._alone = state

    def heard(self, state: RequestState) -> None:
        """It got tokens, or ended."""
        if state.deaths and (state.is_over or state.next_position >= state.clear_at):
            state.untried += state.deaths  # they were not its fault: it may be moved as often again
            state.deaths, state.is_suspect, state.was_alone = 0, False, False
            self.forget(state)

    def forget(self, state: RequestState) -> None:
        """It is tried no more."""
        if state is self._alone:
            self._alone = None
            self._changed.set()
