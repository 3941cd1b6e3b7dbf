"""Log lines for people and for machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from common.telemetry import start_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_for_people_has_the_event_and_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(service="decode-0", level="info", form="text")
    logging.getLogger("baton.test").info("lease.expired", extra={"lease": 7, "blocks": 3})
    logging.getLogger("baton.test").debug("not.shown")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(" I decode-0 lease.expired lease=7 blocks=3\n")
    assert printed.err.count("\n") == 1


def test_a_line_for_machines_is_one_json_object_also_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(service="gateway", level="debug", form="json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("baton.test").exception("loop.failed", extra={"action": "beat"})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert (line["event"], line["level"], line["service"], line["action"]) == (
        "loop.failed",
        "error",
        "gateway",
        "beat",
    )
    assert "ValueError: broken" in line["exception"]
