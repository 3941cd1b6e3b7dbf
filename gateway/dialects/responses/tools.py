"""Tools of the Responses API: functions, custom tools with text inputs, and namespaces of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictStr, Tag

from gateway.answers.ask import Tool, ToolRules
from gateway.dialects.openai.messages import Function, rules_of
from gateway.dialects.responses.custom_input import INPUT
from gateway.dialects.responses.output import Called
from gateway.http.fields import LenientFields
from gateway.http.problem import Json

MAX_DEFINITION_CHARS = 65_536
SERVED = ("function", "custom", "namespace")
SEARCHES = ("web_search", "tool_search")  # prefixes of their types
BETWEEN = "__"  # separates a namespace's name from a tool's


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    @property
    def told(self) -> Json:
        """The form in which a response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }

    def tool(self, name: str) -> Tool:
        made = self.as_tool()
        return Tool(name=name, description=made.description, parameters=made.parameters, strict=made.strict)


class TextFormat(LenientFields):
    """Any text."""

    type: Literal["text"]


class GrammarFormat(LenientFields):
    """Text described by a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[StrictStr, Field(min_length=1, max_length=MAX_DEFINITION_CHARS)]


class CustomTool(LenientFields):
    """A custom tool, whose input is text."""

    type: Literal["custom"]
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: StrictStr | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] = TextFormat(type="text")

    @property
    def told(self) -> Json:
        described = {} if self.description is None else {"description": self.description}
        return {"type": "custom", "name": self.name, **described, "format": self.format.model_dump()}

    def tool(self, name: str) -> Tool:
        """A function with the text as its only argument, since models write calls that way. The description has the grammar.

        Text in JSON can be held to an expression, but to no grammar of Lark's: that one is a model's to keep.
        """
        said, format_ = [self.description] if self.description else [], self.format
        argument: Json = {"type": "string"}
        if isinstance(format_, GrammarFormat):
            said.append(f"The {INPUT} must follow this {format_.syntax} grammar:\n{format_.definition}")
            if format_.syntax == "regex":
                argument["pattern"] = f"^(?:{format_.definition})$"
        parameters = {
            "type": "object",
            "properties": {INPUT: argument},
            "required": [INPUT],
            "additionalProperties": False,
        }
        return Tool(name=name, description="\n\n".join(said) or None, parameters=parameters, strict=True)


class NamespaceTool(LenientFields):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: StrictStr | None = None
    tools: Annotated[list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]], Field(max_length=512)]

    @property
    def told(self) -> Json:
        inner = [tool.told for tool in self.tools]
        return {"type": "namespace", "name": self.name, "description": self.description or "", "tools": inner}


class HostedTool(LenientFields):
    """A tool that runs on OpenAI's servers."""

    type: StrictStr

    @property
    def told(self) -> Json:
        return {"type": self.type}


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in SERVED else "hosted"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a body under the model's names, and the clients' names."""

    rules: ToolRules = field(default_factory=ToolRules)
    called: Mapping[str, Called] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # types of tools that are dropped


def full_name(name: str, namespace: str | None) -> str:
    """A tool's name for the model."""
    return name if not namespace else f"{namespace}{BETWEEN}{name}"


def read_tools(tools: Sequence[AnyTool], choice: Any, *, parallel: bool, leaves_out: bool = False) -> Tools:
    """Combine tools and choice. Raises ValueError that begins with a field's name.

    Tools that others would run are refused, or left out: with `leaves_out`, and searches beside tools that are served. Agents
    send them with each request, and go on without.
    """
    has_others = any(not isinstance(tool, HostedTool) for tool in tools)
    made: list[Tool] = []
    called: dict[str, Called] = {}
    left_out: list[str] = []
    for tool in tools:
        match tool:
            case FunctionTool() | CustomTool():
                inner, namespace = [tool], None
            case NamespaceTool():
                inner, namespace = list(tool.tools), tool.name
            case HostedTool() if leaves_out or (has_others and tool.type.startswith(SEARCHES)):
                left_out.append(tool.type)
                continue
            case HostedTool():
                raise ValueError(
                    f"tools: {tool.type[:64]!r} would be run by OpenAI's own servers: leave it out, or send a function"
                )
        for one in inner:
            name = full_name(one.name, namespace)
            made.append(one.tool(name))
            called[name] = Called(name=one.name, namespace=namespace, is_custom=isinstance(one, CustomTool))
    rules = rules_of(made, _read_choice(choice, called), parallel=parallel)
    return Tools(rules, called, tuple(dict.fromkeys(left_out)))


def _read_choice(choice: Any, called: Mapping[str, Called]) -> Any:
    """A choice in the chat API's form. Raises ValueError."""
    match choice:
        case {"type": "allowed_tools", "tools": [*entries]}:
            return {**choice, "tools": [{"name": _chosen(one, called)} for one in entries]}
        case {"type": "function" | "custom"}:
            return {"type": "function", "name": _chosen(choice, called)}
        case {"type": str(kind)} if kind != "allowed_tools":
            raise ValueError(f"tool_choice: {kind[:64]!r} would be run by OpenAI's own servers: name a function")
    return choice


def _chosen(entry: Any, called: Mapping[str, Called]) -> str:
    """The model's name of the chosen tool. Raises ValueError."""
    match entry:
        case {"type": "function" | "custom", "name": str(name), **rest}:
            namespace = rest.get("namespace")
            if isinstance(namespace, str) or name in called:
                return full_name(name, namespace if isinstance(namespace, str) else None)
            found = [known for known, one in called.items() if one.name == name]
            return found[0] if len(found) == 1 else name
        case {"type": str(kind)}:
            raise ValueError(f"tool_choice: {kind[:64]!r} is no kind of tool that is served here")
    raise ValueError("tool_choice: a tool is chosen by its type and name")
