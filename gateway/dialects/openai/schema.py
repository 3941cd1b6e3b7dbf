"""The bodies of OpenAI's dialect, field by field. What can't be honoured is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from gateway.answers.ask import ToolRules
from gateway.answers.start import MAX_SEQUENCES
from gateway.dialects.openai.formats import FOLLOWED, RESPONSE_FORMAT_SCHEMA, STRUCTURED_SCHEMA, wanted_of
from gateway.dialects.openai.messages import MAX_MESSAGES, Message
from gateway.dialects.openai.tools import (
    CHOICE_SCHEMA,
    MAX_TOOLS,
    OLDER_CHOICE_SCHEMA,
    Function,
    ToolDefinition,
    older_choice,
    rules_of,
)
from gateway.grammars.wanted import Wanted
from gateway.http.fields import MAX_TOKEN_IDS, Count, Metadata, Number, StrictFields, TokenId

MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_LOGIT_BIAS = 1_024
MAX_N = 16
MAX_LOGPROBS = 20
MAX_ALLOWED = 16_384
MAX_BAD_WORDS = 512

BadWord = Annotated[StrictStr, Field(min_length=1, max_length=256)]
Label = Annotated[StrictStr, Field(max_length=1_024)]

# Known fields that are not served: refused with these words unless they are off.
_SHARED_UNSUPPORTED = {
    "logits_processors": "", "use_beam_search": "",
}  # fmt: skip
_CHAT_UNSUPPORTED = _SHARED_UNSUPPORTED | {
    "audio": "only text is supported", "chat_template": "the model's own is used", "documents": "",
    "moderation": "", "web_search_options": "",
    "best_of": "use n", "echo": "", "suffix": "",
}  # fmt: skip

# OpenAI's and vLLM's fields that change nothing here, whatever they say.
_SHARED_INERT = frozenset({"request_id", "spaces_between_special_tokens", "prediction", "guided_decoding_backend"})
_CHAT_INERT = _SHARED_INERT | {"verbosity", "prompt_cache_retention", "prompt_cache_options"}
Budget = Annotated[StrictInt, Field(ge=-1, lt=2**31)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "auto"]
_TIERS = ("auto", "default", "flex", "scale", "priority")

# JSON schemas of the fields that validators check in code.
_NULL = {"type": "null"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_SHARED_SCHEMAS: dict[str, dict[str, Any]] = {
    "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}, _NULL]},
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "maxProperties": MAX_LOGIT_BIAS,
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
            _NULL,
        ]
    },
    "length_penalty": {"enum": [None, 1.0]},
    "service_tier": {"enum": [None, *_TIERS]},
    "response_format": RESPONSE_FORMAT_SCHEMA,
    "structured_outputs": STRUCTURED_SCHEMA,
}
_CHAT_SCHEMAS = _SHARED_SCHEMAS | {
    "tool_choice": CHOICE_SCHEMA,
    "function_call": OLDER_CHOICE_SCHEMA,
}
_COMPLETION_SCHEMAS = _SHARED_SCHEMAS | {
    "prompt": {
        "anyOf": [_TEXT, _TOKEN_IDS, *({"type": "array", "minItems": 1, "items": one} for one in (_TEXT, _TOKEN_IDS))]
    }
}


class StreamOptions(StrictFields):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # vLLM's: usage in every chunk
    include_timings: StrictBool = False  # llama.cpp's `timings` in the last chunk
    include_obfuscation: StrictBool = False  # accepted: Baton never pads chunks


class CommonFields(StrictFields):
    """What chat and completions have in common."""

    inert: ClassVar[frozenset[str]] = _SHARED_INERT
    schemas: ClassVar[dict[str, dict[str, Any]]] = _SHARED_SCHEMAS

    model: StrictStr
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: list[str] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None

    # Accepted because they change nothing here (docs/http-api.md).
    user: Label | None = None
    metadata: Metadata | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    # Not OpenAI's; named as vLLM and others do.
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    skip_special_tokens: StrictBool = True
    include_stop_str_in_output: StrictBool = False
    return_token_ids: StrictBool = False
    timings_per_token: StrictBool = False  # llama.cpp's: `timings` in every chunk, and in a whole answer
    return_tokens_as_token_ids: StrictBool = False
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    length_penalty: Number | None = None
    parse_special: StrictBool | None = None  # llama.cpp's; unset: prompts are parsed, messages are not
    cache_salt: Annotated[StrictStr, Field(max_length=256)] | None = None
    priority: Annotated[StrictInt, Field(ge=-100, le=100)] = 0
    timeout: Annotated[Number, Field(gt=0, le=3600)] | None = None
    ttft_timeout: Annotated[Number, Field(gt=0, le=3600)] | None = None

    # What the answer follows: at most one of them.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    guided_whitespace_pattern: StrictStr | None = None
    _grammar: Wanted | None = PrivateAttr(default=None)

    @field_validator("stop", mode="before")
    @classmethod
    def _bounded_stops(cls, stop: Any) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
            raise ValueError("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        if any(not text or len(text) > MAX_STOP_CHARS for text in stops):
            raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _bounded_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} tokens can be biased")
        if bias and not all(key.isascii() and key.isdigit() and len(key) < 11 for key in bias):
            raise ValueError("keys must be token ids")
        return bias

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _leaves_some(cls, tokens: int | None) -> int | None:
        if tokens == 0:
            raise ValueError("must be -1 (what the context has room for) or at least 1")
        return tokens

    @field_validator("service_tier")
    @classmethod
    def _known_tier(cls, tier: str | None) -> str | None:
        if tier is not None and tier not in _TIERS:
            raise ValueError(f"must be one of {', '.join(_TIERS)}")
        return tier

    @field_validator("length_penalty")
    @classmethod
    def _no_beams(cls, penalty: float | None) -> float | None:
        if penalty not in (None, 1.0):
            raise ValueError("only 1.0 is accepted: there is no beam search")
        return penalty

    @model_validator(mode="after")
    def _scores_come_whole(self) -> CommonFields:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: only without stream")
        return self

    @model_validator(mode="after")
    def _follows_one_thing(self) -> CommonFields:
        self._grammar = wanted_of({name: getattr(self, name) for name in FOLLOWED})
        return self

    @property
    def grammar(self) -> Wanted | None:
        return self._grammar

    @property
    def finish_of_calls(self) -> str:
        """The `finish_reason` of an answer with calls."""
        return "tool_calls"

    @property
    def include_usage(self) -> bool:
        return self.stream and self.stream_options is not None and self.stream_options.include_usage

    @property
    def ends_with_timings(self) -> bool:
        wanted = self.stream_options is not None and self.stream_options.include_timings
        return self.stream and (wanted or self.timings_per_token)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatRequest(CommonFields):
    """Body of POST /v1/chat/completions."""

    unsupported = _CHAT_UNSUPPORTED
    inert = _CHAT_INERT
    schemas = _CHAT_SCHEMAS

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
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
    _tool_rules: ToolRules = PrivateAttr(default_factory=ToolRules)

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not allowed together with add_generation_prompt")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the final message must be the assistant's")
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
        """Whether the client knows only the older form, which answers come back in."""
        return bool(self.functions)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The client's variables, and what `reasoning_effort` says in the names that templates read."""
        effort = self.reasoning_effort
        if effort in (None, "auto"):
            return self.chat_template_kwargs or {}
        thinks = effort != "none"
        said = {"enable_thinking": thinks, "thinking": thinks} | ({"reasoning_effort": effort} if thinks else {})
        return said | (self.chat_template_kwargs or {})

    @property
    def may_think(self) -> bool:
        """Whether the client did not say that it wants no reasoning."""
        said = self.template_variables
        is_off = said.get("enable_thinking") is False or said.get("thinking") is False
        return self.include_reasoning and not is_off and said.get("reasoning_effort") != "none"

    @property
    def reasoning_budget(self) -> int | None:
        """The least of the budgets, which servers name in three ways; -1 is none."""
        named = (self.thinking_token_budget, self.max_thinking_tokens, self.thinking_budget)
        return min((budget for budget in named if budget is not None and budget >= 0), default=None)

    @property
    def opens_answer(self) -> bool:
        """Whether the template begins the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CommonFields):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[dict[str, str]] = _SHARED_UNSUPPORTED | {"suffix": "not supported"}
    schemas: ClassVar[dict[str, dict[str, Any]]] = _COMPLETION_SCHEMAS

    many: ClassVar[Mapping[str, int]] = {"prompt": MAX_TOKEN_IDS}

    prompt: Any  # a validator makes it a list of prompts
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None

    @field_validator("prompt")
    @classmethod
    def _list_of_prompts(cls, prompt: Any) -> list[str | list[int]]:
        if _is_token_ids(prompt):
            return [prompt]
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if len(prompts) > MAX_SEQUENCES:
            raise ValueError(f"at most {MAX_SEQUENCES} prompts times n are allowed")
        if not prompts or any(entry in ("", []) for entry in prompts):
            raise ValueError("must not be empty")
        if not all(isinstance(entry, str) for entry in prompts) and not all(map(_is_token_ids, prompts)):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
        return prompts

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.echoes_logprobs and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not together with echo and logprobs, which say the same")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: only best_of equal to n is supported")
        return self

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the echoed prompt comes with its logprobs."""
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.prompt


def _is_token_ids(value: Any) -> bool:
    """Checked in C: a prompt may have 100,000 tokens. `type` because true is not a token id."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32
