"""Chat messages, and the tools that a client lets the model call, in today's form and in the older one of functions."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.answers.ask import (
    ANY_ARGUMENTS,
    ArgumentsSchema,
    Tool,
    ToolMode,
    ToolName,
    ToolRules,
    thoughts_as,
    tool_rules,
)
from gateway.http.fields import LenientFields, Reading, described

MAX_MESSAGES = 4_096
MAX_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")  # the latter two are the Responses API's
_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}

_NULL = {"type": "null"}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_SAID: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": _PART}]
_OF_ASSISTANTS = ("refusal", "reasoning_content", "reasoning", "tool_calls", "function_call")


def _function_only(kind: str) -> str:
    if kind != "function":
        raise ValueError("only 'function' is supported")
    return kind


Kind = Annotated[StrictStr, AfterValidator(_function_only)]  # a tool's, or a call's
Id = Annotated[StrictStr, Field(max_length=256)]


class CalledFunction(LenientFields):
    """A function called by the assistant. `arguments` is JSON; a client may send it as an object."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = {"arguments": {"type": "string"}}

    name: StrictStr
    arguments: Any = None

    @field_validator("arguments")
    @classmethod
    def _mapping(cls, arguments: Any, info: ValidationInfo) -> dict[str, Any]:
        """Parse arguments: templates want a mapping, so text must be a JSON object."""
        if isinstance(arguments, str):
            if isinstance(info.context, Reading):
                info.context.texts.take(arguments)
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise ValueError("must be a JSON object") from None
        if not isinstance(arguments, dict):
            raise ValueError("must be a JSON object")
        return arguments

    def as_template_input(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments or {}}


class ToolCall(LenientFields):
    """A tool call by the assistant."""

    id: Id = ""
    type: Kind = "function"
    function: CalledFunction


def _described_by_role(schema: dict[str, Any], model: type[LenientFields]) -> None:
    """See `described`; fields that only an assistant may omit are required of others."""
    described(schema, model)
    assistants = dict(schema["properties"])
    others = {name: rule for name, rule in assistants.items() if name not in _OF_ASSISTANTS}
    by_role = [
        {"properties": assistants | {"role": {"const": "assistant"}}, "required": ["role"]},
        {
            "properties": others
            | {"role": {"enum": [role for role in ROLES if role != "assistant"]}, "content": {"anyOf": _SAID}},
            "required": ["role", "content"],
        },
    ]
    for name in ("properties", "required", "type"):
        del schema[name]
    schema["oneOf"] = [{"type": "object", **one} for one in by_role]


class Message(LenientFields):
    """One message of a chat. `content` may be parts; only text parts are supported, and joined."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_described_by_role)

    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [*_SAID, _NULL]},
        "reasoning": {},
    }

    role: StrictStr
    content: StrictStr | None = None
    name: StrictStr | None = None
    refusal: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Id | None = None
    function_call: CalledFunction | None = None

    @field_validator("role")
    @classmethod
    def _served_role(cls, role: str) -> str:
        if role not in ROLES:
            raise ValueError(f"must be {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _joined_parts(cls, content: Any) -> Any:
        return "".join(map(text_of, content)) if isinstance(content, list) else content

    @field_validator("reasoning", mode="before")
    @classmethod
    def _text_or_nothing(cls, reasoning: Any) -> Any:
        return reasoning if isinstance(reasoning, str) else None  # some servers send objects

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content: a {self.role} message needs it")
        return self

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls, including the older form. Assistant-only fields are ignored in other roles."""
        if self.role != "assistant":
            return []
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [ToolCall(id="call_0", function=self.function_call)]

    def as_template_input(self) -> dict[str, Any]:
        """Return the message in the form of chat templates: `developer` becomes `system`, a refusal an assistant's content."""
        content = self.content if self.content is not None else self.refusal or ""
        plain: dict[str, Any] = {"role": _TEMPLATE_ROLES.get(self.role, self.role), "content": content}
        if calls := self.calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.as_template_input()} for call in calls
            ]
        thoughts = None
        if self.role == "assistant":
            thoughts = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        extra = {"name": self.name, "tool_call_id": self.tool_call_id if self.role == "tool" else None}
        plain |= {} if thoughts is None else thoughts_as(thoughts)
        return plain | {name: value for name, value in extra.items() if value is not None}


def text_of(part: Any) -> str:
    """A content part's text; other servers' reasoning parts have none. Raises ValueError."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError("a part must be an object with a type")
    kind = part["type"]
    if kind in _THOUGHT_PARTS:
        return ""
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise ValueError(f"only text is supported, not {kind!r} parts")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"a {kind} part has a string `{'refusal' if kind == 'refusal' else 'text'}`")
    return text


class Function(LenientFields):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: ToolName
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


def _read_choice(choice: Any, field: str) -> tuple[ToolMode, list[str] | None]:
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


def _mode(choice: dict[str, Any], field: str) -> ToolMode:
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
