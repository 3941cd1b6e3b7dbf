"""The newest states of sessions stay within their bounds, and no tenant takes another's place."""

from __future__ import annotations

import pytest

from gateway.answers import sessions
from gateway.answers.sessions import SessionState, SessionStates
from gateway.http.problem import NotKeptError


def state(num_tokens: int) -> SessionState:
    return SessionState(model="m", weights="w", cache_salt="", token_ids=bytes(4 * num_tokens))


def test_the_state_noted_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "TENANT_BYTES", 40)
    monkeypatch.setattr(sessions, "ENTRY_BYTES", 0)
    states = SessionStates()
    for name in ("a", "b", "a", "c"):
        states.note("t", name, state(4))
    assert len(states.find("t", "a").token_ids) == 16
    with pytest.raises(NotKeptError, match="x-session-id"):
        states.find("t", "b")
    states.note("t", "huge", state(11))
    for name in ("a", "c", "huge"):
        with pytest.raises(NotKeptError):
            states.find("t", name)


def test_tenants_are_bounded_together_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "TENANT_BYTES", 34)
    monkeypatch.setattr(sessions, "ENTRY_BYTES", 0)
    monkeypatch.setattr(sessions, "MOST_BYTES", 68)
    states = SessionStates()
    states.note("small", "a", state(4))
    for number in range(10):
        states.note("large", str(number), state(4))
    assert states.find("small", "a")
    for number in range(3):
        states.note(f"other-{number}", "a", state(4))
    with pytest.raises(NotKeptError):
        states.find("small", "a")
    assert states.forget("other-2", "a") == 4
    assert states.forget("other-2", "a") == 0


def kept(states: SessionStates, tenant: str, names: str) -> str:
    found = ""
    for name in names:
        try:
            states.find(tenant, name)
        except NotKeptError:
            continue
        found += name
    return found


def test_states_without_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "TENANT_BYTES", 2 * (sessions.ENTRY_BYTES + 1))
    states = SessionStates()
    states.note("other", "z", state(0))
    for name in "abc":
        states.note("tenant", name, state(0))
    assert (kept(states, "tenant", "abc"), kept(states, "other", "z")) == ("bc", "z")


def test_the_tenant_that_noted_longest_ago_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_BYTES", 2 * (sessions.ENTRY_BYTES + 1))
    states = SessionStates()
    states.note("first", "a", state(0))
    states.note("second", "b", state(0))
    states.note("second", "c", state(0))
    assert (kept(states, "first", "a"), kept(states, "second", "bc")) == ("", "bc")
    assert states.forget("second", "b") == states.forget("second", "c") == 0
    states.note("first", "a", state(0))
    assert kept(states, "first", "a") == "a"
