"""An event of a stream is one line, whatever the text in it, for every client."""

from __future__ import annotations

import json

from gateway.http.streaming import event

TEXT = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n\U0001f389 \xc5 b"


def test_an_event_is_one_line_also_for_who_ends_lines_as_unicode_does() -> None:
    said = event({"text": TEXT}).decode()
    assert len(said.splitlines()) == 2  # the event, and the empty line behind it
    assert said.endswith("\n\n")
    assert json.loads(said.removeprefix("data: ")) == {"text": TEXT}
