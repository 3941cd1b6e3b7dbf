"""Clients' reasoning options as variables of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def template_variables(*, thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Template variables. `thinks` None: the template's default; `effort` is passed on unless reasoning is off."""
    said = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    return said if effort is None or thinks is False else said | {"reasoning_effort": effort}


def may_think(variables: Mapping[str, Any]) -> bool:
    """False if the template's variables turn reasoning off."""
    is_off = variables.get("enable_thinking") is False or variables.get("thinking") is False
    return not is_off and variables.get("reasoning_effort") != "none"


def thoughts_as(text: str) -> dict[str, str]:
    """An assistant's reasoning in the form of chat templates: families read different names."""
    return {"reasoning_content": text, "thinking": text}
