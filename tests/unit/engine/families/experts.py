"""Families with a mixture of experts."""

from __future__ import annotations

from tests.unit.engine.families.case import Case

CASES: tuple[Case, ...] = ()
