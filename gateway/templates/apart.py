"""Rendering in a child process, parent's side: processor time and memory are limited by the system."""

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
LONGEST_RENDER_S = 60.0  # wall-clock: a child may be suspended
LONGEST_START_S = 60.0
MODULE = "gateway.templates.child"


class Opening(msgspec.Struct, frozen=True):
    """The first frame: a `ChatTemplate`'s arguments. Answered by an empty `Rendered`."""

    source: str
    special_tokens: dict[str, str]
    tool_source: str | None
    literals: list[str]  # those of the shade
    name: str
    most_s: float = MAX_RENDER_S


class Conversation(msgspec.Struct, frozen=True):
    """Messages as JSON, since they may contain lone surrogates."""

    messages: bytes
    options: bytes


class Rendered(msgspec.Struct, frozen=True):
    """The shaded text, or the reason that there is none."""

    raw: bytes = b""  # with surrogates
    problem: str = ""
    param: str | None = None
    is_too_long: bool = False

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "surrogatepass")


class Apart:
    """One child, which lives from the first conversation on. It serves one thread at a time."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._child = Child(MODULE)
        self._turn = threading.Lock()

    def shaded(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Rendered:
        """Render in the child. Raises UnavailableError if it can't be started now."""
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
