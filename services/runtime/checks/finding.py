"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from common.settings import ConfigError

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `fail` keeps Baton from running, `warn` makes it slower or less safe. `remedy` may be ""."""

    check: str
    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""

    def line(self) -> str:
        """The line for `baton doctor`."""
        return f"{MARKS[self.level]}  {self.check:<9} {self.said}"

    @property
    def said(self) -> str:
        """The line for other commands."""
        return self.text + (f"; {self.remedy}" if self.remedy else "")


def refuse(findings: Iterable[Finding]) -> None:
    """Raise ConfigError with the failed findings, a line each, if there are any."""
    if failed := [finding.said for finding in findings if finding.level == "fail"]:
        raise ConfigError("\nbaton: ".join(dict.fromkeys(failed)))
