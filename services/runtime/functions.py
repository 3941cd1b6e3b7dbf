"""The function libraries that gateways and `baton up` install in Redis."""

from __future__ import annotations

from gateway.placement.ledger import placement_library
from gateway.tenants.budgets import budgets_library


def function_libraries() -> tuple[str, ...]:
    """The source texts of this release's libraries."""
    return placement_library(), budgets_library()
