"""The bodies of the Responses API, field by field. Unsupported values are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    model_validator,
)

from gateway.answers.ask import MAX_TOOLS, may_think, template_variables
from gateway.dialects.openai.messages import CHOICE_SCHEMA
from gateway.dialects.openai.schema import Effort
from gateway.dialects.openai.shared import INERT, MAX_LOGPROBS, SCHEMAS, UNSUPPORTED, CommonFields
from gateway.dialects.responses.history import NOT_KEPT, History
from gateway.dialects.responses.items import CompactionTrigger, Item, MessageItem, checked_items
from gateway.dialects.responses.tools import AnyTool, HostedTool, Tools, read_tools
from gateway.http.fields import Count, LenientFields, Reading, StrictFields
from gateway.http.problem import Json

_NOT_HERE = "no field of responses"
_UNSUPPORTED = UNSUPPORTED | {
    "n": "a response is one answer", "max_tokens": "use max_output_tokens", "max_completion_tokens": "use max_output_tokens",
    "messages": "use input", "response_format": "use text.format", "reasoning_effort": "use reasoning.effort",
    "prompt_logprobs": _NOT_HERE, "return_token_ids": _NOT_HERE, "timings_per_token": _NOT_HERE,
    "return_tokens_as_token_ids": _NOT_HERE, "include_stop_str_in_output": _NOT_HERE,
    "prompt": "prompts are not kept here: send instructions and input",
    "moderation": "", "image": "only text is supported", "access_programs": "", "background_options": "",
    "context_management": "send a compaction_trigger item, or ask /v1/responses/compact",
}  # fmt: skip
_INERT = INERT | {"prompt_cache_options", "client_metadata"}
INCLUDES = (
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_TEXT = {"type": "string"}
_SCHEMAS = SCHEMAS | {
    "input": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
    "tool_choice": CHOICE_SCHEMA,
    "include": {"anyOf": [{"type": "array", "items": {"enum": list(INCLUDES)}}, {"type": "null"}]},
}


class ReasoningOptions(LenientFields):
    """Thinking options; a summary is the whole reasoning, since none is generated."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def told(self) -> Json:
        return {"effort": self.effort, "summary": self.summary or self.generate_summary}


class TextOptions(LenientFields):
    """The form of the answer's text. `verbosity` is passed to the template."""

    format: Annotated[dict[str, Any], Field(max_length=16)] = Field(default_factory=lambda: {"type": "text"})
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _is_told(self) -> TextOptions:
        kind = self.format.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise ValueError("format: type must be text, json_object or json_schema")
        if kind == "json_schema" and not isinstance(self.format.get("schema"), dict):
            raise ValueError("format: a json_schema has a name and a schema")
        return self

    @property
    def followed(self) -> Json:
        """The text format in the chat API's form."""
        if self.format["type"] == "json_schema":
            return {"type": "json_schema", "json_schema": self.format}
        return self.format

    @property
    def told(self) -> Json:
        named = {"name": "response"} if self.format["type"] == "json_schema" else {}
        return {"format": named | self.format, "verbosity": self.verbosity or "medium"}


class Conversed(LenientFields):
    """A stored conversation, by its id."""

    id: StrictStr


def _conversed(given: Any) -> Any:
    return {"id": given} if isinstance(given, str) else given


class ResponseRequest(CommonFields):
    """Body of POST /v1/responses."""

    unsupported: ClassVar[dict[str, str]] = _UNSUPPORTED
    inert: ClassVar[frozenset[str]] = _INERT
    schemas: ClassVar[dict[str, dict[str, Any]]] = _SCHEMAS

    input: Annotated[list[Item], BeforeValidator(checked_items), Field(default_factory=list)]
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_tool_calls: Annotated[StrictInt, Field(ge=0)] | None = (
        None  # limits the calls of hosted tools, of which there are none
    )
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[StrictStr], Field(max_length=32)] | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: StrictBool | None = None
    previous_response_id: Annotated[StrictStr, Field(max_length=128)] | None = None
    conversation: Annotated[Conversed, BeforeValidator(_conversed)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    thinking_token_budget: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    _tools: Tools = PrivateAttr(default_factory=Tools)
    _history: History | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _combinations(self, info: ValidationInfo) -> ResponseRequest:
        if not (self.input or self.previous_response_id or self.conversation):
            raise ValueError("input: this field is required")
        if self.previous_response_id and self.conversation:
            raise ValueError("previous_response_id: not together with conversation")
        leaves_out = isinstance(info.context, Reading) and info.context.ignores_unknown
        parallel = self.parallel_tool_calls is not False
        self._tools = read_tools(self.tools or (), self.tool_choice, parallel=parallel, leaves_out=leaves_out)
        self._ignored += tuple(f"tools.{kind}" for kind in self._tools.left_out)
        return self

    @model_validator(mode="after")
    def _can_be_told(self) -> ResponseRequest:
        unknown = [one for one in self.include or () if one not in INCLUDES]
        if unknown:
            raise ValueError(f"include: {unknown[0][:64]!r} is not known: choose from {', '.join(INCLUDES)}")
        if self.top_logprobs and self.num_logprobs is None:
            raise ValueError('top_logprobs: needs include: ["message.output_text.logprobs"]')
        if self.stream_options is not None and (
            self.stream_options.include_timings or self.stream_options.continuous_usage_stats
        ):
            raise ValueError("stream_options: a response tells its usage at its end, and no timings")
        return self

    @property
    def called(self) -> Tools:
        return self._tools

    @property
    def history(self) -> History:
        return self._history or NOT_KEPT

    def recalled(self, history: History) -> ResponseRequest:
        """The request completed from a store."""
        found = self.model_copy(update={"input": [*history.before, *history.own]})
        found._history = history
        return found

    @property
    def other_formats(self) -> dict[str, Any]:
        return {} if self.text is None else {"text": self.text.followed}

    @property
    def compacts(self) -> bool:
        """True if the conversation is to be compacted."""
        return bool(self.input) and isinstance(self.input[-1], CompactionTrigger)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if "message.output_text.logprobs" in (self.include or ()) else None

    @property
    def template_variables(self) -> Json:
        """The client's template variables, and those derived from reasoning and verbosity."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        is_told = effort not in (None, "auto")
        said = template_variables(thinks=effort != "none", effort=effort) if is_told else {}
        verbosity = self.text.verbosity if self.text is not None else None
        said |= {} if verbosity is None else {"verbosity": verbosity}
        return said | (self.chat_template_kwargs or {})

    @property
    def may_think(self) -> bool:
        return may_think(self.template_variables)

    @property
    def reasoning_budget(self) -> int | None:
        budget = self.thinking_token_budget
        return None if budget is None or budget < 0 else budget

    @property
    def summarises(self) -> bool:
        return self.reasoning is not None and self.reasoning.told["summary"] is not None

    @property
    def echoed(self) -> Json:
        """Fields of the request that a response repeats."""
        return {
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.told for tool in self.tools or () if not isinstance(tool, HostedTool)],
            "background": bool(self.background),
            "conversation": None if self.conversation is None else {"id": self.conversation.id},
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": (self.reasoning or ReasoningOptions()).told,
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.history.stores,
            "text": (self.text or TextOptions(format={"type": "text"})).told,
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


class CountedRequest(ResponseRequest):
    """Body of POST /v1/responses/input_tokens."""

    personality: Annotated[StrictStr, Field(max_length=256)] | None = None  # meant by OpenAI for its own models


class CompactRequest(StrictFields):
    """Body of POST /v1/responses/compact."""

    inert: ClassVar[frozenset[str]] = frozenset({"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"})
    unsupported: ClassVar[dict[str, str]] = {"image": "only text is supported"}
    schemas: ClassVar[dict[str, dict[str, Any]]] = {"input": _SCHEMAS["input"]}

    model: StrictStr
    input: Annotated[list[Item], BeforeValidator(checked_items)]
    instructions: StrictStr | None = None
    previous_response_id: Annotated[StrictStr, Field(max_length=128)] | None = None
    service_tier: StrictStr | None = None
    _request: ResponseRequest | None = PrivateAttr(default=None)

    @property
    def request(self) -> ResponseRequest:
        """The response request that compacts it."""
        if self._request is None:
            items = [one for one in self.input if not isinstance(one, CompactionTrigger)]
            self._request = ResponseRequest(
                model=self.model,
                input=[*items, CompactionTrigger(type="compaction_trigger")],
                instructions=self.instructions,
                previous_response_id=self.previous_response_id,
            )
        return self._request

    def kept(self, answer_id: str) -> list[Json]:
        """Users' messages, which are kept unchanged."""
        said = [one for one in self.input if isinstance(one, MessageItem) and one.role == "user"]
        suffix = answer_id.partition("_")[2]
        return [{**one.told(), "id": one.id or f"msg_{suffix}k{index:04x}"} for index, one in enumerate(said)]
