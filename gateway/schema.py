"""The requests of OpenAI's dialect, field by field. What can't be honoured is refused by name; nothing is ignored silently.

`null` means absent, as in OpenAI's specification. Messages of ValueErrors raised here begin with the field's name where a
rule concerns several fields: `parse_body` makes it the error's `param`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from common.errors import InvalidRequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_LOGIT_BIAS = 1_024
MAX_N = 16
MAX_MESSAGES = 4_096

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # an integer is one too; "1" and true are not
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**32)]
Count = Annotated[StrictInt, Field(ge=1)]
Label = Annotated[StrictStr, Field(max_length=1_024)]
MetadataKey = Annotated[StrictStr, Field(max_length=64)]
MetadataValue = Annotated[StrictStr, Field(max_length=512)]

# Known fields of OpenAI's or vLLM's dialect that are not served: refused with these words unless they say "off".
_TOOLS = "tools are not supported yet"
_SHARED_UNSUPPORTED = {
    "allowed_token_ids": "", "bad_words": "", "guided_choice": "", "guided_grammar": "", "guided_json": "",
    "guided_regex": "", "length_penalty": "", "logits_processors": "", "prompt_logprobs": "", "structured_outputs": "",
    "truncate_prompt_tokens": "", "use_beam_search": "",
}  # fmt: skip
_CHAT_UNSUPPORTED = _SHARED_UNSUPPORTED | {
    "audio": "only text is supported", "chat_template": "the model's own is used", "documents": "",
    "function_call": _TOOLS, "functions": _TOOLS, "moderation": "", "prediction": "", "reasoning_effort": "",
    "tools": _TOOLS, "verbosity": "", "web_search_options": "", "best_of": "use n", "echo": "", "suffix": "",
}  # fmt: skip
_MESSAGE_UNSUPPORTED = {
    "annotations": "", "audio": "only text is supported", "function_call": _TOOLS, "tool_call_id": _TOOLS,
    "tool_calls": _TOOLS,
}  # fmt: skip


class StrictFields(BaseModel):
    """Refuses unknown fields; drops known ones that are null, and unsupported ones that are null or off."""

    model_config = ConfigDict(extra="forbid")
    unsupported: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.unsupported:
                if value is not None and value is not False and value != [] and value != {}:
                    raise ValueError(f"{name}: {cls.unsupported[name] or 'not supported yet'}")
            elif value is not None or name not in cls.model_fields:
                kept[name] = value
        return kept


class StreamOptions(StrictFields):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # vLLM's: the usage so far in every chunk; load generators ask for it
    include_obfuscation: StrictBool = False  # accepted: Baton never pads chunks


class Message(StrictFields):
    """One message of a chat. `content` may be parts; only text parts are served, and they are joined."""

    unsupported = _MESSAGE_UNSUPPORTED

    role: StrictStr
    content: StrictStr | None = None
    name: StrictStr | None = None
    refusal: StrictStr | None = None
    reasoning_content: StrictStr | None = None

    @field_validator("role")
    @classmethod
    def _served_role(cls, role: str) -> str:
        if role in ("tool", "function"):
            raise ValueError(_TOOLS)
        if role not in ("system", "developer", "user", "assistant"):
            raise ValueError("must be system, developer, user or assistant")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _joined_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise ValueError("a part must be an object with a type")
            if part["type"] != "text":
                raise ValueError(f"only text is supported, not {part['type']!r} parts")
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise ValueError("a text part has a string `text` and nothing else")
            texts.append(part["text"])
        return "".join(texts)

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content: a {self.role} message needs it")
        if self.role != "assistant" and (self.refusal is not None or self.reasoning_content is not None):
            raise ValueError("refusal and reasoning_content belong to assistant messages")
        return self

    def as_template_input(self) -> dict[str, Any]:
        """What chat templates expect. `developer` is their `system`; a refusal was what the assistant said."""
        content = self.content if self.content is not None else self.refusal or ""
        plain = {"role": "system" if self.role == "developer" else self.role, "content": content}
        extra = {"name": self.name, "reasoning_content": self.reasoning_content}
        return plain | {name: value for name, value in extra.items() if value is not None}


class _Common(StrictFields):
    model: StrictStr
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: list[str] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None

    # Accepted because they change nothing here (docs/http-api.md says so).
    user: Label | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    # Not OpenAI's; names as vLLM and others have them.
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    skip_special_tokens: StrictBool = True
    include_stop_str_in_output: StrictBool = False
    return_token_ids: StrictBool = False
    cache_salt: Annotated[StrictStr, Field(max_length=256)] | None = None
    priority: Annotated[StrictInt, Field(ge=-100, le=100)] = 0
    timeout: Annotated[Number, Field(gt=0, le=3600)] | None = None
    ttft_timeout: Annotated[Number, Field(gt=0, le=3600)] | None = None

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

    @field_validator("store")
    @classmethod
    def _stores_nothing(cls, store: bool | None) -> bool | None:
        if store:
            raise ValueError("nothing is stored here: only false is accepted")
        return store

    @field_validator("service_tier")
    @classmethod
    def _one_tier(cls, tier: str | None) -> str | None:
        if tier not in (None, "auto", "default"):
            raise ValueError("only 'auto' and 'default' are accepted")
        return tier

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> _Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    @property
    def stops(self) -> list[str]:
        return self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatRequest(_Common):
    """Body of POST /v1/chat/completions."""

    unsupported = _CHAT_UNSUPPORTED

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None  # says nothing without tools
    modalities: list[Literal["text"]] | None = None

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value != {"type": "text"}:
            raise ValueError('only {"type": "text"} is supported yet; json_object and json_schema are not')
        return value

    @field_validator("tool_choice")
    @classmethod
    def _no_tool_choice(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError(_TOOLS)
        return value

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not allowed together with add_generation_prompt")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the final message must be the assistant's")
        return self

    @property
    def opens_answer(self) -> bool:
        """Whether the template writes the beginning of the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Common):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[dict[str, str]] = _SHARED_UNSUPPORTED | {"suffix": "not supported"}

    prompt: Any  # string, strings, token ids or lists of token ids; made a list of prompts below
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None

    @field_validator("prompt")
    @classmethod
    def _list_of_prompts(cls, prompt: Any) -> list[str | list[int]]:
        if _is_token_ids(prompt):
            return [prompt]
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if not prompts or any(entry in ("", []) for entry in prompts):
            raise ValueError("must not be empty")
        if not all(isinstance(entry, str) for entry in prompts) and not all(map(_is_token_ids, prompts)):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
        return prompts

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: only best_of equal to n is supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not supported together with logprobs")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(StrictFields):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: StrictBool = True
    add_special_tokens: StrictBool = True  # to a prompt; a chat template writes its own

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(StrictFields):
    """Body of POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[TokenId]


Body = TypeVar("Body", bound=BaseModel)


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """Validate a JSON body. Raises InvalidRequestError that names the first wrong field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first["type"], [str(part) for part in first["loc"]], first["msg"]) from None


def _invalid(kind: str, where: list[str], message: str) -> InvalidRequestError:
    message = message.removeprefix("Value error, ")
    path = ".".join(where)
    if kind == "extra_forbidden":
        return InvalidRequestError(f"unknown field {path!r}: remove it or check its spelling", param=where[0])
    if kind == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if kind == "missing":
        return InvalidRequestError(f"{path}: this field is required", param=where[0])
    if where:
        return InvalidRequestError(f"{path}: {message}", param=where[0])
    param, separator, _ = message.partition(": ")  # a rule over several fields
    return InvalidRequestError(message, param=param if separator and param.isidentifier() else None)


def _is_token_ids(value: Any) -> bool:
    """By passes that don't run in Python: a prompt may have 100,000 tokens. `type` because true is not a token id."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32
