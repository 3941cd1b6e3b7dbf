"""Rendering in a child process, from the gateway's side: bounded in processor time and memory by the system."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.errors import UnavailableError
from gateway.children.child import Child, DiedError

log = logging.getLogger("baton.templates")

MAX_RENDER_S = 10.0  # processor time
LONGEST_RENDER_S = 60.0  # by the clock: a child may stand still
LONGEST_START_S = 60.0
MODULE = "gateway.templates.child"


class Opening(msgspec.Struct, frozen=True):
    """The first frame: a `ChatTemplate`'s arguments. Answered by an empty `Rendered`."""

    source: str
    special_tokens: dict[str, str]
    tool_source: str | None
    literals: list[str]  # the shade's
    name: str
    most_s: float = MAX_RENDER_S


class Conversation(msgspec.Struct, frozen=True):
    """JSON, since messages may have halves of surrogate pairs."""

    messages: bytes
    options: bytes


class Rendered(msgspec.Struct, frozen=True):
    """The shaded text, or why there is none."""

    raw: bytes = b""  # with surrogates
    problem: str = ""
    param: str | None = None
    is_too_long: bool = False

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "surrogatepass")


class Apart:
    """One child, which lives from the first conversation on. One thread at a time is served."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._child = Child(MODULE)
        self._turn = threading.Lock()

    def shaded(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Rendered:
        """Raises UnavailableError when the child can't be had now."""
        asked = Conversation(json.dumps(messages).encode(), json.dumps(options).encode())
        with self._turn:
            return self._shaded(asked)

    def close(self) -> None:
        with self._turn:
            self._child.end()

    def _shaded(self, asked: Conversation) -> Rendered:
        name = f" ({self._opening.name})" if self._opening.name else ""
        try:
            if not self._child.is_there:
                self._child.start()
                self._child.ask(msgspec.structs.replace(self._opening, most_s=MAX_RENDER_S), Rendered, LONGEST_START_S)
            return self._child.ask(asked, Rendered, LONGEST_RENDER_S)
        except DiedError as died:
            if died.code == -signal.SIGPROF:
                what = f"took more than {MAX_RENDER_S:g} s of processor time for them"
                return Rendered(problem=f"messages: the chat template{name} {what}", param="messages")
            why = str(died)
        except (OSError, TimeoutError) as error:
            self._child.end()
            why = f"{type(error).__name__}: {error}"
        log.warning("templates.not_rendered", extra={"reason": why, "template": self._opening.name})
        raise UnavailableError(f"the chat template{name} could not be rendered just now: ask again")
