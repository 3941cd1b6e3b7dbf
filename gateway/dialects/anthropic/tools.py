"""Tools as Anthropic's clients define and choose them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictStr, field_validator, model_validator

from gateway.answers.ask import ArgumentsSchema, Tool, ToolMode, ToolName, ToolRules, tool_rules
from gateway.http.fields import LenientFields

_SEARCHES = "tool_search_tool_"  # all tools are in the prompt: there is nothing to search
_INERT = ("defer_loading", "input_examples", "allowed_callers")  # reported in the answer's header


class ClientTool(LenientFields):
    """An entry of `tools`: a client's function with its schema; a tool search is dropped."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        "type": {"anyOf": [{"const": "custom"}, {"type": "string", "pattern": f"^{_SEARCHES}"}, {"type": "null"}]}
    }

    type: StrictStr = "custom"
    name: ToolName
    description: StrictStr | None = None
    input_schema: ArgumentsSchema | None = None
    strict: StrictBool | None = None
    defer_loading: StrictBool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[Any] | None = None

    @field_validator("type")
    @classmethod
    def _of_the_client(cls, kind: str) -> str:
        if kind != "custom" and not kind.startswith(_SEARCHES):
            raise ValueError(f"{kind!r} is not a tool of the client: leave it out, or define one with an input_schema")
        return kind

    @model_validator(mode="after")
    def _has_schema(self) -> ClientTool:
        if self.input_schema is None and not self.is_search:
            raise ValueError("input_schema: a tool needs it")
        return self

    @property
    def is_search(self) -> bool:
        return self.type.startswith(_SEARCHES)

    @property
    def as_tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.input_schema or {},
            strict=bool(self.strict),
        )

    @property
    def ignored_fields(self) -> list[str]:
        return [name for name in _INERT if getattr(self, name)]


class ChosenTool(LenientFields):
    """The value of `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[StrictStr, Field(max_length=128)] | None = None
    disable_parallel_tool_use: StrictBool = False

    @model_validator(mode="after")
    def _names_one(self) -> ChosenTool:
        if (self.name is None) == (self.type == "tool"):
            raise ValueError("name: the tool's name, with type 'tool' alone")
        return self


def rules_of(tools: Sequence[ClientTool], choice: ChosenTool | None) -> ToolRules:
    """Combine tools and choice. Raises ValueError that begins with a field's name."""
    own = [tool.as_tool for tool in tools if not tool.is_search]
    if choice is None:
        return tool_rules(own, "auto", None, parallel=True)
    modes: dict[str, ToolMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    allowed = None if choice.name is None else [choice.name]
    parallel = not choice.disable_parallel_tool_use and choice.type != "tool"
    return tool_rules(own, modes[choice.type], allowed, parallel=parallel)


def ignored_fields(tools: Sequence[ClientTool]) -> list[str]:
    """Fields of tools that are ignored, each once."""
    found = (name for tool in tools for name in tool.ignored_fields)
    return [f"tools.{name}" for name in dict.fromkeys(found)]
