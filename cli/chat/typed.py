"""A person's input: edited lines with history and completion on a terminal, multi-line texts, or a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HISTORY = Path.home() / ".local" / "state" / "baton" / "chat_history"
MAX_HISTORY = 2000  # lines
FENCE = '"""'
PROMPT, MORE = "you> ", "...> "


class Typed:
    """The reader. `read()` returns the next text; `ask` reads one line and raises EOFError at the end."""

    def __init__(self, ask: Callable[[str], str] | None = None) -> None:
        self.is_terminal = sys.stdin.isatty() and ask is None
        self._ask = ask or input

    def read(self, prompt: str = PROMPT) -> str:
        """Read a line, or the lines between two fences. Raises EOFError and KeyboardInterrupt."""
        line = self._line(prompt)
        if not line.lstrip().startswith(FENCE):
            return line.strip()
        lines, rest = list[str](), line.lstrip().removeprefix(FENCE)
        while not rest.rstrip().endswith(FENCE):
            lines.append(rest)
            rest = self._line(MORE)
        lines.append(rest.rstrip().removesuffix(FENCE))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        return self._ask(prompt if self.is_terminal else "")


@contextlib.contextmanager
def editing(words: Sequence[str], file: Path, *, keeps: Callable[[], bool]) -> Iterator[None]:
    """Line editing with completion of `words`, and a history in `file`, written if it `keeps` one; only its owner may read it."""
    try:
        import readline
    except ImportError:  # Python without readline: no editing
        yield
        return

    def complete(text: str, state: int) -> str | None:
        found = [word for word in words if word.startswith(text)] if text.startswith("/") else []
        return f"{found[state]} " if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \n")
    readline.parse_and_bind("tab: complete")
    readline.set_auto_history(True)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        if keeps():
            readline.set_history_length(MAX_HISTORY)
            with contextlib.suppress(OSError):  # an unwritable home keeps no history
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
                readline.write_history_file(file)
