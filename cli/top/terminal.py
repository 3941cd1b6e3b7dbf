"""Terminal control for `baton top`: the alternate screen, and unbuffered keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence

from cli.top.keys import keys_of

HOME, LINE_END, REST = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """Context manager: the alternate screen; the previous contents are restored."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


@contextlib.contextmanager
def keys(pressed: Callable[[str], None], resized: Callable[[], None]) -> Iterator[None]:
    """Context manager: `pressed` gets each key, also Ctrl-C and end of input; `resized` is called on resizes."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(sys.stdin.fileno(), 1024).decode(errors="replace")
        for key in keys_of(typed) or [""]:
            pressed(key)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, pressed, "\x03")
    loop.add_signal_handler(signal.SIGWINCH, resized)
    loop.add_reader(sys.stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(sys.stdin)


def draw(lines: Sequence[str]) -> None:
    sys.stdout.write(HOME + f"{LINE_END}\r\n".join(lines) + LINE_END + REST)
    sys.stdout.flush()
