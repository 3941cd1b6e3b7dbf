"""Statistics count what ended, by model, in seconds from a request's receipt."""

from __future__ import annotations

import pytest

from gateway.answers.catalogue import Tallies
from gateway.request.attempt import AttemptLine
from gateway.request.timeline import Timeline, Timelines


def ended(lines: Timelines, model: str, *, error: Exception | None = None, cancelled: str = "") -> None:
    line = Timeline(request_id="a", received_at=1.0, submitted_at=1.0, prompt_tokens=1, model=model)
    lines.start(line)
    line.began(AttemptLine(number=1, began_at=3.0, because="", prefill="p", decode=[], reason="load"))
    lines.end(line, error=error, cancelled=cancelled)


def test_choices_are_counted_by_model_and_by_how_they_ended() -> None:
    tallies, lines = Tallies(["chat", "coder"]), Timelines()
    lines.on_end(tallies.observe)
    ended(lines, "chat")
    ended(lines, "chat", cancelled="stop string")
    ended(lines, "chat", cancelled="client disconnected")
    ended(lines, "chat", error=ValueError("broke"))
    ended(lines, "made up")
    chat = tallies.of("chat")
    assert (chat.succeeded, chat.failed, chat.waited_s) == (2, 2, pytest.approx(4.0))
    assert chat.succeeded_s > chat.waited_s
    assert chat.last_unix_ms > 0
    assert (tallies.of("coder").succeeded, tallies.of("made up").succeeded) == (0, 0)
