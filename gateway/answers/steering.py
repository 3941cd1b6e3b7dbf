"""Running answers by id, so that clients may end their reasoning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.errors import InvalidRequestError
from common.messages import Grammar
from gateway.answers.answer import Answer
from gateway.answers.choice import Choice
from gateway.http.problem import NotKeptError

Closing = Callable[[], Awaitable[Grammar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steered:
    """An answer, its owner, and the maker of the grammar that closes its reasoning; None: it is not steerable."""

    answer: Answer
    tenant: str
    closing: Closing | None

    @property
    def thinking(self) -> list[Choice]:
        return [choice for choice in self.answer.choices if choice.is_thinking]


class Steering:
    """Tracks every answer from its start to its end."""

    def __init__(self) -> None:
        self._running: dict[str, _Steered] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(self, answer: Answer, tenant: str, closing: Closing | None) -> None:
        """Track the answer until it ends. `closing` raises ServingError."""
        self._running[answer.id] = _Steered(answer=answer, tenant=tenant, closing=closing)
        answer.on_end.append(self._forget)

    def _forget(self, answer: Answer) -> None:
        self._running.pop(answer.id, None)

    async def end_reasoning(self, answer_id: str, tenant: str) -> bool:
        """Close the reasoning of all thinking choices; return False if none thinks.

        Raises NotKeptError, InvalidRequestError for an answer that didn't ask for it, and what its `closing` raises.
        """
        found = self._running.get(answer_id)
        if found is None or found.tenant != tenant:
            raise NotKeptError(f"no answer {answer_id[:200]!r} of yours runs on this gateway", param="id")
        if found.closing is None:
            raise InvalidRequestError(
                "reasoning_control: only a request that sets it true lets its reasoning be ended",
                param="reasoning_control",
            )
        if not found.thinking:
            return False
        grammar = await found.closing()
        return sum(choice.generation.end_reasoning(grammar) for choice in found.thinking) > 0
