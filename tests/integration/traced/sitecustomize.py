"""The functions that a process enters. Python imports this module at its start where `PYTHONPATH` names its folder.

SIGRTMIN has the process write what it entered since the last one, with the instant of each first entry. `TRACED_NOT_OF` names
a function whose callees don't count: a timer's, which on a slow machine comes at any moment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class Entered:
    """Code -> the instant of its first entry."""

    def __init__(self, folder: Path, timer: str) -> None:
        self._folder = folder
        self._found: dict[CodeType, float] = {}
        self._timer = timer
        self._num_written = 0

    def enter(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in self._found and not self._is_timed(frame):
            self._found[frame.f_code] = time.monotonic()

    def _is_timed(self, frame: FrameType) -> bool:
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_qualname != self._timer:
            caller = caller.f_back
        return caller is not None

    def write(self, *_: object) -> None:
        found, self._found = self._found, {}
        self._num_written += 1
        unfinished = self._folder / f"{os.getpid()}.unfinished"
        entries = list(found.items())  # at once: another thread may still be about to add its own
        unfinished.write_text(json.dumps([(code.co_filename, code.co_qualname, at) for code, at in entries]))
        unfinished.rename(self._folder / f"{os.getpid()}.{self._num_written}.json")


if "TRACED_TO" in os.environ:
    entered = Entered(Path(os.environ["TRACED_TO"]), os.environ["TRACED_NOT_OF"])
    signal.signal(signal.SIGRTMIN, entered.write)
    threading.setprofile(entered.enter)
    sys.setprofile(entered.enter)
