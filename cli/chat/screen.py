"""The output of answers: streamed; on a terminal with rich, each finished block is redrawn as Markdown."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
FENCE = re.compile(r"\s*(```+|~~~+)")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

Render = Callable[[str], None]  # prints a block of Markdown


class Blocks:
    """Splits a stream of Markdown at the ends of blocks: at an empty line outside code, and after code."""

    def __init__(self) -> None:
        self.open = ""  # the unfinished block

    def take(self, piece: str) -> list[str]:
        """Add a piece; return the blocks that it completes."""
        self.open += piece
        ended: list[str] = []
        while "\n" in piece and (end := _end_of_block(self.open)) is not None:
            ended.append(self.open[:end])
            self.open = self.open[end:]
        return ended


def _end_of_block(text: str) -> int | None:
    """Offset of the end of the first block, with its empty line; only complete lines count."""
    fence, at, begun = "", 0, False
    for line in text.splitlines(keepends=True):
        at += len(line)
        if not line.endswith("\n"):
            return None
        found = FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence):
                return at
        elif found:
            fence = found[1]
        elif not line.strip() and begun:
            return at
        begun = begun or bool(line.strip())
    return None


def rows_of(text: str, columns: int, width_of: Callable[[str], int]) -> int:
    """Terminal rows that `text` fills from the left edge on, without the cursor's."""
    lines = text.split("\n")
    return sum(max(0, width_of(line) - 1) // columns for line in lines) + len(lines) - 1


class Screen:
    """The screen. `out` gets the text; with `render` a finished block is redrawn if it is still visible."""

    def __init__(self, out: TextIO, *, is_terminal: bool, render: Render | None = None) -> None:
        self._out, self._render = out, render
        self.is_terminal = is_terminal
        self.draws = True  # Markdown, where it can
        self._blocks = Blocks()

    def text(self, piece: str) -> None:
        """Show a piece of an answer. Control characters other than newlines and tabs are dropped."""
        piece = piece.translate(CONTROL) if self.is_terminal else piece
        if self._render is None or not self.draws:
            self._write(piece)
            return
        shown, ended = self._blocks.open, self._blocks.take(piece)
        for block in ended:
            self._write(block[len(shown) :] if block.startswith(shown) else block)
            self._draw(block)
            shown = ""
        self._write(self._blocks.open[len(shown) :])

    def end(self) -> None:
        """Finish the answer."""
        rest, self._blocks = self._blocks.open, Blocks()
        if self._render is not None and rest.strip():
            self._draw(rest)
        else:
            self._write("\n")

    def fold(self, words: int) -> None:
        """Show the number of thinking tokens so far."""
        if self.is_terminal:
            self._write(f"\r{DIM}(thinking, {words} words){PLAIN}\x1b[K")

    def unfold(self) -> None:
        if self.is_terminal:
            self._write("\r\x1b[K")

    def note(self, text: str) -> None:
        """Print a line that is not the model's."""
        text = text.translate(CONTROL)
        self._write(f"{DIM}{text}{PLAIN}\n" if self.is_terminal else f"{text}\n")

    def _draw(self, block: str) -> None:
        assert self._render is not None
        from rich.cells import cell_len

        size = shutil.get_terminal_size()
        rows = rows_of(block.expandtabs(8), size.columns, cell_len)
        if rows >= size.lines:  # its beginning scrolled off the screen
            self._write("" if block.endswith("\n") else "\n")
            return
        self._write((f"\x1b[{rows}A" if rows else "") + "\r\x1b[J")
        self._render(block)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def screen() -> Screen:
    """Standard output; Markdown is rendered on a terminal if rich is installed."""
    is_terminal = sys.stdout.isatty()
    return Screen(sys.stdout, is_terminal=is_terminal, render=_rich() if is_terminal else None)


def _rich() -> Render | None:
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:
        return None
    console = Console(highlight=False)

    def render(block: str) -> None:
        with console.capture() as drawn:
            console.print(Markdown(block.strip("\n"), hyperlinks=False))
        sys.stdout.write(trimmed(drawn.get()) + "\n\n")

    return render


def trimmed(drawn: str) -> str:
    """Strip the empty lines that some kinds of blocks have above and below."""
    lines = drawn.split("\n")
    full = [index for index, line in enumerate(lines) if STYLE.sub("", line).strip()]
    return "\n".join(lines[full[0] : full[-1] + 1]) if full else ""
