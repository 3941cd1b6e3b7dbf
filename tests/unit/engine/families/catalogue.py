"""All cases."""

from __future__ import annotations

from tests.unit.engine.families import dense, experts, foreign, hybrids

CASES = [*dense.CASES, *experts.CASES, *hybrids.CASES, *foreign.CASES]
