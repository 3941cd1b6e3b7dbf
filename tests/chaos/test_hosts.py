"""The kill matrix's rows of a host; `make chaos` has them in its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.asks import Oracle
from tests.chaos.hosts import FAULTS, HostFault, under_load


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_host_that_dies_costs_its_clients_nothing_but_time(
    fault: HostFault, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    verdict = await under_load(tmp_path, model, oracle, fault)
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})
    assert verdict.whole
