"""Log lines for people and for machines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from common.tracing import in_trace
from services.runtime.log import start_logging

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


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


async def test_a_line_about_a_request_has_the_id_of_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(service="gateway", level="debug", form="json")
    log, left = logging.getLogger("baton.test"), asyncio.Event()

    async def goes_on() -> None:
        await left.wait()
        log.info("later")

    with in_trace(CONTEXT):
        log.info("inside", extra={"request_id": "r"})
        begun = asyncio.create_task(goes_on())
        with in_trace("no trace\n"):  # of another request, from a process that made it up
            log.info("not believed")
        log.info("inside again")
    log.info("outside")
    left.set()
    await begun
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line["event"]: line.get("trace_id") for line in lines} == {
        "inside": CONTEXT[3:35], "not believed": None, "inside again": CONTEXT[3:35], "outside": None,
        "later": CONTEXT[3:35],
    }  # fmt: skip
    assert lines[0]["request_id"] == "r"


def test_people_read_the_trace_at_the_end_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(service="gateway", level="info", form="text")
    with in_trace(CONTEXT):
        logging.getLogger("baton.test").info("request.retry", extra={"request_id": "r"})
    assert capsys.readouterr().err.endswith(f" request.retry request_id=r trace_id={CONTEXT[3:35]}\n")
