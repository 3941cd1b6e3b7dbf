"""Families that keep a state beside keys and values."""

from __future__ import annotations

from tests.unit.engine.families.case import Case

CASES: tuple[Case, ...] = ()
