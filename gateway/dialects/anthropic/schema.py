"""The bodies of Anthropic's dialect, field by field. Unsupported values are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from common.messages import Keep
from gateway.answers.ask import MAX_TOOLS, Conversation, ToolRules, may_think, template_variables
from gateway.dialects.anthropic.blocks import Text, blocks_of, system_text
from gateway.dialects.anthropic.conversation import Turn, template_messages
from gateway.dialects.anthropic.tools import ChosenTool, ClientTool, ignored_fields, rules_of
from gateway.dialects.drafts import Drafted
from gateway.dialects.foreign import Foreign, TranslatedFields, ignored, refused
from gateway.dialects.stops import MAX_STOPS, STOP_SCHEMA, Stops
from gateway.grammars import wanted
from gateway.grammars.wanted import Wanted
from gateway.http.fields import Count, LenientFields, Number

MAX_MESSAGES = 100_000
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_BLOCK = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_INERT = frozenset(
    {
        "diagnostics",  # prefix caching is automatic
        "metadata", "user_profile_id", "workspace_id", "billing_policy",  # keys identify the client
        "service_tier", "anthropic_version", "anthropic_beta", "betas",
    }
)  # fmt: skip
_FOREIGN: dict[str, Foreign] = {
    **ignored("a conversation is its client's to edit", "context_management"),
    **ignored("there is one of it", "speed", "inference_geo"),
    **ignored("nothing is declined", "fallbacks", "fallback_credit_token"),
    **refused("nothing but the model runs here: let the client run the tool", "container", "mcp_servers"),
    **refused("send the whole conversation in messages", "thread", "compaction"),
}


class CacheControl(LenientFields):
    """A mark: what stands before it is worth keeping for so long after each use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


def _longest_mark(body: Mapping[str, Any]) -> float:
    """Seconds of the longest mark in a body; 0 without one. Raises ValueError that begins with a field's name."""
    found = _mark_of(body, "cache_control")
    for name in ("system", "tools", "messages"):
        entries = body.get(name)
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            found = max(found, _mark_of(entry, f"{name}: {index}: cache_control"))
            content = entry.get("content") if isinstance(entry, Mapping) else None
            for block in content if isinstance(content, list) else ():
                found = max(found, _mark_of(block, f"{name}: {index}: cache_control"))
    return found


def _mark_of(marked: Any, name: str) -> float:
    said = marked.get("cache_control") if isinstance(marked, Mapping) else None
    if said is None:
        return 0.0
    if not isinstance(said, Mapping) or said.get("type") != "ephemeral":
        raise ValueError(f"{name}: must be an object of type 'ephemeral'")
    ttl = said.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in _TTL_S:
        raise ValueError(f"{name}: ttl: must be one of {', '.join(_TTL_S)}")
    return _TTL_S[ttl]


class MessageTurn(LenientFields):
    """One message; its content is a text, or blocks."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
    }

    role: Literal["user", "assistant", "system"]
    content: Any

    @field_validator("content")
    @classmethod
    def _in_blocks(cls, content: Any) -> Any:
        return blocks_of(content)

    @property
    def turn(self) -> Turn:
        return Turn(self.role, self.content)


class ThinkingConfig(LenientFields):
    """The value of `thinking`. Without a type the template's default applies."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(LenientFields):
    """The value of `output_config.format`."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(LenientFields):
    """The value of `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class PromptFields(TranslatedFields):
    """The fields of a prompt, and its thinking budget."""

    foreign: ClassVar[Mapping[str, Foreign]] = _FOREIGN
    inert: ClassVar[frozenset[str]] = _INERT
    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        "system": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}, {"type": "null"}]},
        "stop_sequences": {"anyOf": [{"type": "array", "maxItems": MAX_STOPS, "items": STOP_SCHEMA}, {"type": "null"}]},
    }

    model: StrictStr
    messages: Annotated[list[MessageTurn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Any = ""
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChosenTool | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of `output_config.format`
    cache_control: CacheControl | None = None
    _messages: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _tool_rules: ToolRules = PrivateAttr(default_factory=ToolRules)
    _keep_s: float = PrivateAttr(default=0.0)

    @model_validator(mode="wrap")
    @classmethod
    def _marked(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        keep_s = _longest_mark(body) if isinstance(body, Mapping) else 0.0
        made = handler(body)
        made._keep_s = keep_s
        return made

    @property
    def keep(self) -> Keep:
        """The longest of the marks, for the whole prompt."""
        return Keep(ttl_s=self._keep_s)

    @field_validator("system")
    @classmethod
    def _joined(cls, system: Any) -> str:
        blocks = blocks_of(system)
        if not all(isinstance(block, Text) for block in blocks):
            raise ValueError("only text blocks are of the system")
        return system_text(block.text for block in blocks if isinstance(block, Text))

    @model_validator(mode="after")
    def _together(self) -> Self:
        self._tool_rules = rules_of(self.tools or (), self.tool_choice)
        self._messages = template_messages(self.system, (message.turn for message in self.messages))
        if not self._messages:
            raise ValueError("messages: they say nothing")
        if self._messages[-1].get("tool_calls"):
            raise ValueError("messages: the last tool_use needs its tool_result")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        return (*self._ignored, *ignored_fields(self.tools or ()))

    @property
    def tool_rules(self) -> ToolRules:
        return self._tool_rules

    @property
    def template_variables(self) -> dict[str, Any]:
        """Thinking and effort as template variables."""
        kind = self.thinking.type if self.thinking is not None else "adaptive"
        effort = self.output_config.effort if self.output_config is not None else None
        return template_variables(thinks={"enabled": True, "disabled": False}.get(kind), effort=effort)

    @property
    def may_think(self) -> bool:
        return may_think(self.template_variables)

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def thinking_budget(self) -> int | None:
        """Maximum tokens of reasoning."""
        is_bound = self.thinking is not None and self.thinking.type == "enabled"
        return self.thinking.budget_tokens if self.thinking is not None and is_bound else None

    @property
    def conversation(self) -> Conversation:
        """The prompt. A final message of the assistant is continued."""
        goes_on = self._messages[-1]["role"] == "assistant"
        return Conversation(
            messages=self._messages,
            tools=self._tool_rules.tools,
            opens_answer=not goes_on,
            continues_final_message=goes_on,
            variables=self.template_variables,
        )


class MessagesRequest(PromptFields):
    """Body of POST /v1/messages."""

    max_tokens: Count
    stream: StrictBool = False
    stop_sequences: Stops | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    speculation: Drafted | None = None

    @property
    def followed(self) -> Wanted | None:
        """The schema of the answer's text."""
        config = self.output_config.format if self.output_config is not None else None
        format_, field = (config, "output_config") if config is not None else (self.output_format, "output_format")
        return wanted.json_schema(field, format_.schema_) if format_ is not None else None


class CountTokensRequest(PromptFields):
    """Body of POST /v1/messages/count_tokens. Fields about the answer are ignored."""

    inert: ClassVar[frozenset[str]] = _INERT | {
        "max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k", "speculation",
    }  # fmt: skip
