"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `fail` keeps Baton from running, `warn` makes it slower or less safe. `remedy` may be ""."""

    check: str
    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""

    def line(self) -> str:
        """For people."""
        return f"{MARKS[self.level]}  {self.check:<9} {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def shown(url: str) -> str:
    """The URL without user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
