"""What each client's script shares: its cases, and one line of JSON for each result. Standard library only."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "demo"
WEATHER = "What is the weather in Paris?"
PERSON = "Extract name and age as JSON: Anna is 25 and lives in Paris."
GET_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CASES: list[tuple[str, Callable[[], Any]]] = []


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A function, async or not, that raises if the client isn't served as it expects."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _CASES.append((name, function))
        return function

    return add


def run() -> None:
    """Run all cases, each for itself; print `{"case": …, "error": …}` lines."""
    for name, function in _CASES:
        error = ""
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
        except Exception as problem:
            traceback.print_exc(limit=-3)
            error = f"{type(problem).__name__}: {problem}"[:500]
        print(json.dumps({"case": name, "error": error}), flush=True)
