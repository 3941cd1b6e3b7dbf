"""All cases."""

from __future__ import annotations

from tests.unit.engine.families import dense, experts, foreign, hybrids, vision

CASES = [*dense.CASES, *experts.CASES, *hybrids.CASES, *vision.CASES, *foreign.CASES]
