"""The newest state of each session that requests name: the tokens that a client may keep under a name."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from common.blocks import pack_tokens
from gateway.answers.answer import Answer
from gateway.http.problem import NotKeptError

MOST_BYTES = 64 << 20
TENANT_BYTES = MOST_BYTES // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """The tokens of a session's last request and answer, and what their KV depends on."""

    model: str
    weights: str  # their fingerprint
    cache_salt: str  # the client's
    token_ids: bytes  # packed


class SessionStates:
    """States by tenant and session, the one used longest ago first to go."""

    def __init__(self) -> None:
        self._states: OrderedDict[tuple[str, str], SessionState] = OrderedDict()
        self._num_bytes: dict[str, int] = {}  # by tenant

    def follow(self, answer: Answer, session: str, *, tenant: str, cache_salt: str) -> None:
        """Note the state of an answer's session when it ends, if it has one choice. `cache_salt`: the client's."""
        if len(answer.choices) != 1:
            return

        def ended(answer: Answer) -> None:
            answer.on_end.remove(ended)
            state = SessionState(
                model=answer.own_model,
                weights=answer.weights,
                cache_salt=cache_salt,
                token_ids=pack_tokens(answer.choices[0].generation.token_ids),
            )
            self.note(tenant, session, state)

        answer.on_end.append(ended)

    def note(self, tenant: str, session: str, state: SessionState) -> None:
        """Make this a session's newest state."""
        self.forget(tenant, session)
        self._states[tenant, session] = state
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + len(state.token_ids)
        while self._num_bytes[tenant] > TENANT_BYTES:
            self.forget(*next(key for key in self._states if key[0] == tenant))
        while sum(self._num_bytes.values()) > MOST_BYTES:
            self.forget(*next(iter(self._states)))

    def find(self, tenant: str, session: str) -> SessionState:
        """Raises NotKeptError."""
        state = self._states.get((tenant, session))
        if state is None:
            message = (
                f"no answer of session {session[:100]!r} ended at this gateway: name it in x-session-id of its requests"
            )
            raise NotKeptError(message, param="session")
        return state

    def forget(self, tenant: str, session: str) -> int:
        """Forget a session's state; return its number of tokens."""
        state = self._states.pop((tenant, session), None)
        if state is None:
            return 0
        self._num_bytes[tenant] -= len(state.token_ids)
        return len(state.token_ids) // 4
