"""Number of a property's examples: few and the same ones in `make test`, more and others in `make properties`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

MORE = 10  # times as many
SEARCHES = 1_000  # examples that the profile of `make properties` has


def examples(count: int, **more: Any) -> settings:
    """Settings of a test with `count` examples in `make test`."""
    is_search = settings().max_examples >= SEARCHES
    return settings(max_examples=count * MORE if is_search else count, deadline=None, **more)
