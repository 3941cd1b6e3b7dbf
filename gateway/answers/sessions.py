"""The newest state of each session that requests name: the tokens that a client may keep under a name."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from common.blocks import pack_tokens
from gateway.answers.answer import Answer
from gateway.http.problem import NotKeptError

MOST_BYTES = 64 << 20
TENANT_BYTES = MOST_BYTES // 4
ENTRY_BYTES = 512  # a state's objects, beside its tokens and its session's name


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """The tokens of a session's last request and answer, and what their KV depends on."""

    model: str
    weights: str  # their fingerprint
    cache_salt: str  # the client's
    token_ids: bytes  # packed


@dataclass(slots=True)
class TenantStates:
    """A tenant's states by session, the one noted longest ago first."""

    states: OrderedDict[str, SessionState] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class SessionStates:
    """States by tenant and session, those noted longest ago first to go: a tenant's own, then the idlest tenant's."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, TenantStates] = OrderedDict()  # the one that noted longest ago first
        self._num_bytes = 0

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
        held = self._tenants.setdefault(tenant, TenantStates())
        self._tenants.move_to_end(tenant)
        held.states[session] = state
        self._count(held, _num_bytes(session, state))
        while held.num_bytes > TENANT_BYTES:
            self.forget(tenant, next(iter(held.states)))
        while self._num_bytes > MOST_BYTES:
            idlest, others = next(iter(self._tenants.items()))
            self.forget(idlest, next(iter(others.states)))

    def find(self, tenant: str, session: str) -> SessionState:
        """Raises NotKeptError."""
        held = self._tenants.get(tenant)
        state = held.states.get(session) if held is not None else None
        if state is None:
            message = (
                f"no answer of session {session[:100]!r} ended at this gateway: name it in x-session-id of its requests"
            )
            raise NotKeptError(message, param="session")
        return state

    def forget(self, tenant: str, session: str) -> int:
        """Forget a session's state; return its number of tokens."""
        held = self._tenants.get(tenant)
        state = held.states.pop(session, None) if held is not None else None
        if held is None or state is None:
            return 0
        self._count(held, -_num_bytes(session, state))
        if not held.states:
            del self._tenants[tenant]
        return len(state.token_ids) // 4

    def _count(self, held: TenantStates, num_bytes: int) -> None:
        held.num_bytes += num_bytes
        self._num_bytes += num_bytes


def _num_bytes(session: str, state: SessionState) -> int:
    return len(state.token_ids) + len(session) + ENTRY_BYTES
