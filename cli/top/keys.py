"""View state of `baton top`, and the keys that change it; pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from cli.top.tables import TABS, Tab

PAGE = 10  # rows
ESCAPES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[Z": "back",
}
HELP = (
    ("1 2 3 4, Tab", "workers, requests, tenants, events"),
    ("← →, < >", "sort by the column to the left or right"),
    ("r", "turn the order round"),
    ("/", "filter: rows that have each word; column:word looks in one column. Enter ends, Esc clears"),
    ("↑ ↓, j k", "scroll; PgUp, PgDn, Home, End"),
    ("p, space", "hold the picture, and go on"),
    ("?", "this help"),
    ("q, Ctrl-C", "leave"),
)


@dataclass(slots=True)
class Choice:
    """The view of one tab: sort, filter, scroll."""

    sort: str
    descends: bool
    words: str = ""
    top: int = 0  # first visible row


@dataclass(slots=True)
class Chosen:
    """The selected tab, and the view of each."""

    tab: int = 0
    choices: list[Choice] = field(default_factory=lambda: [Choice(tab.sort, tab.descends) for tab in TABS])
    types: bool = False  # a filter is being typed
    paused: bool = False
    helps: bool = False
    left: bool = False

    @property
    def now(self) -> Choice:
        return self.choices[self.tab]

    @property
    def shown(self) -> Tab:
        return TABS[self.tab]

    def key(self, key: str) -> None:
        """Apply a key."""
        if key in ("\x03", "\x04"):
            self.left = True
        elif self.types:
            self._type(key)
        elif self.helps:
            self.helps = False
        else:
            self._do(key)

    def _type(self, key: str) -> None:
        choice = self.now
        if key in ("\r", "\n"):
            self.types = False
        elif key == "\x1b":
            self.types, choice.words = False, ""
        elif key in ("\x7f", "\b"):
            choice.words = choice.words[:-1]
        elif len(key) == 1 and key.isprintable():
            choice.words += key
        choice.top = 0

    def _do(self, key: str) -> None:
        choice = self.now
        moves = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "page up": -PAGE,
            "page down": PAGE,
            "home": -(10**6),
            "end": 10**6,
        }
        if key in ("q", "Q", ""):
            self.left = True
        elif key.isdigit() and 1 <= int(key) <= len(TABS):
            self.tab = int(key) - 1
        elif key in ("\t", "back"):
            self.tab = (self.tab + (1 if key == "\t" else -1)) % len(TABS)
        elif key in ("left", "<", "right", ">"):
            self._sort(1 if key in ("right", ">") else -1)
        elif key in moves:
            choice.top = max(0, choice.top + moves[key])
        elif key == "r":
            choice.descends = not choice.descends
        elif key == "/":
            self.types = True
        elif key == "\x1b":
            choice.words = ""
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key in ("?", "h"):
            self.helps = True

    def _sort(self, step: int) -> None:
        keys = [column.key for column in self.shown.columns]
        self.now.sort = keys[(keys.index(self.now.sort) + step) % len(keys)]


def keys_of(typed: str) -> list[str]:
    """Split a terminal's input into single keys."""
    found, at = list[str](), 0
    while at < len(typed):
        known = next((code for code in ESCAPES if typed.startswith(code, at)), typed[at])
        found.append(ESCAPES.get(known, known))
        at += len(known)
    return found
