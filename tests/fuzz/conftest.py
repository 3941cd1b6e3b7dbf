"""How much is tried: little in `make test`, much with `--hypothesis-profile=long` (`make fuzz`). The counts are printed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("long", max_examples=5_000, deadline=None, suppress_health_check=_SLOW)
TRIED: Counter[str] = Counter()


@pytest.fixture
def tried() -> Counter[str]:
    """Inputs tried, by what took them."""
    return TRIED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in sorted(TRIED.items()):
        terminalreporter.write_line(f"fuzz: {count} inputs for {name}")
