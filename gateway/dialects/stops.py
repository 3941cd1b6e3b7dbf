"""Stop strings and their limits."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
STOP_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOPS_SCHEMA = {
    "anyOf": [STOP_SCHEMA, {"type": "array", "maxItems": MAX_STOPS, "items": STOP_SCHEMA}, {"type": "null"}]
}


def _bounded(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
    if any(not text or len(text) > MAX_STOP_CHARS for text in stops):
        raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


Stops = Annotated[list[str], BeforeValidator(_bounded)]  # a single one may come bare
