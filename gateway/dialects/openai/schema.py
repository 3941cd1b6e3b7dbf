"""The bodies of OpenAI's dialect, field by field. Unsupported values are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.answers.ask import MAX_TOOLS, ToolRules, may_think, template_variables
from gateway.answers.start import MAX_SEQUENCES
from gateway.dialects.foreign import Foreign
from gateway.dialects.openai.foreign import CHAT, COMPLETIONS
from gateway.dialects.openai.messages import (
    CHOICE_SCHEMA,
    MAX_MESSAGES,
    OLDER_CHOICE_SCHEMA,
    Function,
    Message,
    ToolDefinition,
    older_choice,
    rules_of,
)
from gateway.dialects.openai.shared import INERT, MAX_LOGPROBS, MAX_N, SCHEMAS, UNSUPPORTED, CommonFields
from gateway.http.fields import MAX_TOKEN_IDS, Count, ids_read

_CHAT_UNSUPPORTED = UNSUPPORTED | {
    "audio": "only text is supported", "chat_template": "the model's own is used", "documents": "",
    "moderation": "", "web_search_options": "",
    "best_of": "use n", "echo": "", "suffix": "",
}  # fmt: skip

_CHAT_INERT = INERT | {"verbosity", "prompt_cache_options"}
Budget = Annotated[StrictInt, Field(ge=-1, lt=2**31)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "auto"]

_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_CHAT_SCHEMAS = SCHEMAS | {
    "tool_choice": CHOICE_SCHEMA,
    "function_call": OLDER_CHOICE_SCHEMA,
}
_COMPLETION_SCHEMAS = SCHEMAS | {
    "prompt": {
        "anyOf": [_TEXT, _TOKEN_IDS, *({"type": "array", "minItems": 1, "items": one} for one in (_TEXT, _TOKEN_IDS))]
    }
}


class ChatRequest(CommonFields):
    """Body of POST /v1/chat/completions."""

    foreign = CHAT
    unsupported = _CHAT_UNSUPPORTED
    inert = _CHAT_INERT
    schemas = _CHAT_SCHEMAS

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool = False  # vLLM's: BOS before the template's text
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS)] | None = None
    function_call: Any = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: StrictBool = True
    thinking_token_budget: Budget | None = None
    max_thinking_tokens: Budget | None = None
    thinking_budget: Budget | None = None
    reasoning_control: StrictBool = False  # llama.cpp's: reasoning may be ended early
    _tool_rules: ToolRules = PrivateAttr(default_factory=ToolRules)

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not allowed together with add_generation_prompt")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the final message must be the assistant's")
        if self.reasoning_control and self.ignore_eos:
            raise ValueError("reasoning_control: not allowed together with ignore_eos")
        if self.tools and self.functions:
            raise ValueError("functions: not allowed together with tools")
        self._tool_rules = self._read_tools()
        return self

    def _read_tools(self) -> ToolRules:
        older = older_choice(self.function_call)
        if self.functions:
            functions = [function.as_tool() for function in self.functions]
            return rules_of(functions, older, parallel=False, field="function_call")
        tools = [tool.function.as_tool() for tool in self.tools or ()]
        return rules_of(tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    @property
    def tool_rules(self) -> ToolRules:
        return self._tool_rules

    @property
    def finish_of_calls(self) -> str:
        return "function_call" if self.calls_functions else "tool_calls"

    @property
    def calls_functions(self) -> bool:
        """True if the client uses the older function form, in which it is answered."""
        return bool(self.functions)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The client's template variables, and those derived from `reasoning_effort`."""
        effort = self.reasoning_effort
        if effort in (None, "auto"):
            return self.chat_template_kwargs or {}
        return template_variables(thinks=effort != "none", effort=effort) | (self.chat_template_kwargs or {})

    @property
    def may_think(self) -> bool:
        """False if the client asked for no reasoning."""
        return self.include_reasoning and may_think(self.template_variables)

    @property
    def reasoning_budget(self) -> int | None:
        """The smallest of the thinking budgets, which servers name in three ways; -1 is none."""
        named = (self.thinking_token_budget, self.max_thinking_tokens, self.thinking_budget)
        return min((budget for budget in named if budget is not None and budget >= 0), default=None)

    @property
    def opens_answer(self) -> bool:
        """True if the template begins the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CommonFields):
    """Body of POST /v1/completions."""

    foreign: ClassVar[Mapping[str, Foreign]] = COMPLETIONS
    unsupported: ClassVar[dict[str, str]] = UNSUPPORTED
    schemas: ClassVar[dict[str, dict[str, Any]]] = _COMPLETION_SCHEMAS

    many: ClassVar[Mapping[str, int]] = {"prompt": MAX_TOKEN_IDS}
    lists_of_ids: ClassVar[tuple[str, ...]] = ("prompt",)

    suffix: StrictStr | None = None  # text after the answer
    prompt: Any  # a validator makes it a list of prompts
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: StrictBool = False
    add_special_tokens: StrictBool = True
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None

    @field_validator("prompt")
    @classmethod
    def _list_of_prompts(cls, prompt: Any, info: ValidationInfo) -> list[str | list[int]]:
        read = ids_read(info)
        if isinstance(read[0], int) if read else _is_token_ids(prompt):
            return [read or prompt]
        prompts = read or (prompt if isinstance(prompt, list) else [prompt])
        if len(prompts) > MAX_SEQUENCES:
            raise ValueError(f"at most {MAX_SEQUENCES} prompts times n are allowed")
        empty = [] if info.data.get("suffix") else [""]  # `suffix` alone is enough
        if read:
            return prompts
        if not prompts or any(entry in (*empty, []) for entry in prompts):
            raise ValueError("must not be empty")
        if not all(isinstance(entry, str) for entry in prompts) and not all(map(_is_token_ids, prompts)):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
        return prompts

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.echoes_logprobs and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not together with echo and logprobs, which say the same")
        if self.suffix and self.echo:
            raise ValueError("suffix: not together with echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError("suffix: only with prompts of text")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of: must be n at least")
        if self.ranks and self.stream:
            raise ValueError("best_of: above n only without stream")
        return self

    @property
    def ranks(self) -> bool:
        """True if more choices are generated than returned: the likeliest are."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def echoes_logprobs(self) -> bool:
        """True if the echoed prompt has logprobs."""
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.prompt


def _is_token_ids(value: Any) -> bool:
    """Check token ids in C: a prompt may have 100,000 tokens. `type` because true is not a token id."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32
