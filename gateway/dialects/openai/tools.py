"""Tools, in today's form and in the older one of functions."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import StrictBool, StrictStr

from gateway.answers.ask import Tool, ToolRules
from gateway.dialects.openai.messages import Kind
from gateway.dialects.tools import ANY_ARGUMENTS, ArgumentsSchema, Mode, Name, tool_rules
from gateway.http.fields import LenientFields


class Function(LenientFields):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: Name
    description: StrictStr | None = None
    parameters: ArgumentsSchema | None = None
    strict: StrictBool | None = None

    def as_tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters or ANY_ARGUMENTS,
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
    """Combine tools and choice. Raises ValueError that begins with a field's name."""
    mode, allowed = _read_choice(choice, field)
    names_one = isinstance(choice, dict) and choice.get("type") == "function"
    return tool_rules(tools, mode, allowed, parallel=parallel and not names_one, field=field)


def _read_choice(choice: Any, field: str) -> tuple[Mode, list[str] | None]:
    """Mode (none, auto, required) and the names of callable functions; None: all. Raises ValueError."""
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


def _mode(choice: dict[str, Any], field: str) -> Mode:
    mode = choice.get("mode", "auto")
    if mode == "auto" or mode == "required":
        return mode
    raise ValueError(f"{field}: mode must be auto or required")


def _name_of(entry: Any, field: str) -> str:
    match entry:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise ValueError(f"{field}: an allowed tool must name a function")


def older_choice(choice: Any) -> Any:
    """Convert `function_call` to `tool_choice`. Raises ValueError."""
    match choice:
        case None | "none" | "auto":
            return choice
        case {"name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise ValueError('function_call: must be none, auto or {"name": …}')
