"""Tools: what a client lets the model call, in today's form and in the older one of functions."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool, StrictStr, field_validator

from gateway.answers.ask import Tool, ToolRules
from gateway.dialects.openai.messages import Kind, LenientFields

MAX_TOOLS = 512
MAX_TOOL_CHARS = 1_000_000
Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
NO_TOOLS = ToolRules()


class Function(LenientFields):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: Name
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None

    @field_validator("parameters")
    @classmethod
    def _bounded_schema(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and len(json.dumps(parameters)) > MAX_TOOL_CHARS:
            raise ValueError(f"at most {MAX_TOOL_CHARS} characters of JSON are allowed")
        return parameters

    def as_tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters or {"type": "object", "properties": {}},
            strict=bool(self.strict),
        )


class ToolDefinition(LenientFields):
    """An entry of `tools`."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = {"type": {"const": "function"}}

    type: Kind = "function"
    function: Function


CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object", "required": ["type"]}, {"type": "null"}]
}
OLDER_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"enum": ["none", "auto"]}, {"type": "object", "required": ["name"]}, {"type": "null"}]
}


def rules_of(tools: list[Tool], choice: Any, *, parallel: bool, field: str = "tool_choice") -> ToolRules:
    """What tools and choice say together. Raises ValueError that begins with a field's name."""
    names = {tool.name for tool in tools}
    if len(names) != len(tools):
        raise ValueError("tools: two have the same name")
    mode, allowed = _read_choice(choice, field)
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
        parallel=parallel and not (isinstance(choice, dict) and choice.get("type") == "function"),
    )


def _read_choice(choice: Any, field: str) -> tuple[str, list[str] | None]:
    """Mode (none, auto, required) and the names that may be called; None: all. Raises ValueError."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", None
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*entries]} as inner}:
            return _mode(inner, field), [_name_of(entry, field) for entry in entries]
        case {"type": "allowed_tools", "tools": [*entries]}:
            return _mode(choice, field), [_name_of(entry, field) for entry in entries]
    raise ValueError(f"{field}: must be none, auto, required, or name a function or allowed_tools")


def _mode(choice: dict[str, Any], field: str) -> str:
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise ValueError(f"{field}: mode must be auto or required")
    return str(mode)


def _name_of(entry: Any, field: str) -> str:
    match entry:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise ValueError(f"{field}: an allowed tool must name a function")


def older_choice(choice: Any) -> Any:
    """`function_call`'s values as those of `tool_choice`. Raises ValueError."""
    match choice:
        case None | "none" | "auto":
            return choice
        case {"name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise ValueError('function_call: must be none, auto or {"name": …}')
