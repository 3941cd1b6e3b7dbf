"""The child process that says what workers would refuse: it reads their settings, and writes a text for each."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from services.runtime.loading import load_settings
from services.worker.process import FAILURES
from services.worker.ranks import check_ranks
from services.worker.settings import WorkerServiceSettings


def said(variables: Mapping[str, str]) -> str:
    """The refusal of one worker; "" if it would start, as far as its model goes."""
    try:
        check_ranks(load_settings(WorkerServiceSettings, command="worker", arguments=[], environment=variables).sized())
    except FAILURES as error:
        return str(error)
    return ""


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[dict[str, str]])
    sys.stdout.buffer.write(msgspec.json.encode([said(variables) for variables in asked]))
