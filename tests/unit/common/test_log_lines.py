"""Others' words in a log: one line each, and nothing that a terminal obeys."""

from __future__ import annotations

import logging

import pytest

from cli.top.keys import Chosen
from cli.top.state import State
from cli.top.view import frame, picture
from common.log import Outage, printable
from services.runtime.log import _Text

HOSTILE = "x\n19:00:00.000 I gateway all.is.well\x1b[2J\x9b31m\u2028"


def test_a_field_makes_no_second_line_and_no_escape() -> None:
    record = logging.LogRecord("baton", logging.WARNING, "", 0, "job.failed", None, None)
    record.__dict__["why"] = HOSTILE
    line = _Text("worker").format(record)
    assert line.count("\n") == 0
    assert line.endswith("why=x\\n19:00:00.000 I gateway all.is.well\\x1b[2J\\x9b31m\\u2028")


@pytest.mark.parametrize("text", ["plain", "Zürich 東京", "cmpl-1 (a, b)", ""])
def test_text_stays_what_it_is(text: str) -> None:
    assert printable(text) == text


def test_top_shows_a_hostile_name_as_text() -> None:
    state = State()
    state.take("fleet", {"workers": [], "gateways": [{"id": HOSTILE}], "models": [{"name": HOSTILE}]})
    state.take("log", {"log": [{"text": HOSTILE, "what": HOSTILE}]})
    shown = "\n".join([*picture(state, 200), *(text for text, _ in frame(state, Chosen(tab=3), 200, 30))])
    assert "all.is.well" in shown
    assert "\x1b" not in shown
    assert "\x9b" not in shown


def test_an_outage_is_said_twice_however_often_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage(logging.getLogger("test"), "nats")
    outage.ended()
    for _ in range(53):
        outage.failed("refused")
    outage.ended()
    outage.ended()
    assert [record.getMessage() for record in caplog.records] == ["nats.away", "nats.back"]
    assert caplog.records[-1].__dict__["tries"] == 53
