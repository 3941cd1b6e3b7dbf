"""Clients' words about reasoning, in the names that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def template_variables(*, thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Variables of a template. `thinks` None: as the template would; `effort` is told unless there is to be no reasoning."""
    said = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    return said if effort is None or thinks is False else said | {"reasoning_effort": effort}


def may_think(variables: Mapping[str, Any]) -> bool:
    """Whether nothing in a template's variables says that there is to be no reasoning."""
    is_off = variables.get("enable_thinking") is False or variables.get("thinking") is False
    return not is_off and variables.get("reasoning_effort") != "none"


def thoughts_as(text: str) -> dict[str, str]:
    """An assistant's reasoning as chat templates get it: families differ in the name they read."""
    return {"reasoning_content": text, "thinking": text}
