"""What the code under test logs as an error is a violation, unless the weather brought it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World


class FailedPassError(RuntimeError):
    """A pass that the weather failed."""


@contextmanager
def errors_are_violations(world: World) -> Iterator[None]:
    """What the code logs as an error is one, unless the weather brought it."""
    logger = logging.getLogger("baton")
    handler = _Handler(world)
    before = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG if world.log else logging.ERROR)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Handler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        if record.levelno < logging.ERROR:
            self._world.tell(f"    {text} {getattr(record, 'reason', '')}")
        elif text in ("intake.bad_digest", "pulls.bad_digest"):
            self._world.faults["bad digest"] += 1
        elif text == "device.step_failed" and isinstance(error, FailedPassError):
            self._world.faults["failed pass"] += 1
        elif text == "worker.device_broken":
            self._world.tell(text)
        else:
            self._world.violate(f"{text}: {error!r}")
