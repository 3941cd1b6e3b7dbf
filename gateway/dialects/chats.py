"""Reasoning and tools in every dialect of chats: what clients say of them, as templates and rules of ours take it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictStr

from gateway.answers.ask import Tool, ToolRules

MAX_TOOLS = 512
MAX_TOOL_CHARS = 1_000_000
NO_TOOLS = ToolRules()
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
Mode = Literal["none", "auto", "required"]


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


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(schema)) > MAX_TOOL_CHARS:
        raise ValueError(f"at most {MAX_TOOL_CHARS} characters of JSON are allowed")
    return schema


Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
ArgumentsSchema = Annotated[dict[str, Any], AfterValidator(_bounded)]


def tool_rules(
    tools: Sequence[Tool], mode: Mode, allowed: Sequence[str] | None, *, parallel: bool, field: str = "tool_choice"
) -> ToolRules:
    """Return the rules for `tools`; `allowed` None: all may be called. Raises ValueError that begins with a field's name.

    `field`: the client's name for the choice.
    """
    names = {tool.name for tool in tools}
    if len(names) != len(tools):
        raise ValueError("tools: two have the same name")
    if mode == "none":
        return NO_TOOLS
    unknown = [name for name in allowed or () if name not in names]
    if unknown:
        raise ValueError(f"{field}: {unknown[0]!r} is not among the tools")
    if not tools:
        if mode == "required":
            raise ValueError(f"{field}: there are no tools to call")
        return NO_TOOLS
    return ToolRules(
        tools=tools,
        must_call=mode == "required",
        allowed=frozenset(names if allowed is None else allowed),
        parallel=parallel,
    )
