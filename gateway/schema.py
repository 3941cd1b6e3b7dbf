"""The requests of OpenAI's dialect, field by field. What can't be honoured is refused by name; nothing is ignored silently."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_LOGIT_BIAS = 1_024
MAX_N = 16
MAX_MESSAGES = 4_096

Unit = Annotated[float, Field(strict=False)]


class UnsupportedError(ValueError):
    """A field of OpenAI's dialect that Baton does not serve (yet)."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # accepted: Baton never pads chunks


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    """One message of a chat. `content` may be parts; only text parts are served."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | list[TextPart] | None = None
    name: StrictStr | None = None
    refusal: StrictStr | None = None
    reasoning_content: StrictStr | None = None

    def as_template_input(self) -> dict[str, Any]:
        """What chat templates expect: plain text content."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        plain = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return plain | ({"name": self.name} if self.name else {})


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Unit, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[Unit, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    presence_penalty: Annotated[Unit, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[Unit, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[Unit, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    user: StrictStr | None = None  # accepted; not used

    # Not OpenAI's; names as vLLM and others have them.
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[Unit, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[Unit, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=256)] | None = None
    skip_special_tokens: StrictBool = True
    include_stop_str_in_output: StrictBool = False
    return_token_ids: StrictBool = False
    cache_salt: Annotated[StrictStr, Field(max_length=256)] | None = None
    priority: Annotated[StrictInt, Field(ge=-100, le=100)] = 0
    timeout: Annotated[Unit, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        if any(not text or len(text) > MAX_STOP_CHARS for text in stops):
            raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bounded_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} tokens can be biased")
        if bias and not all(key.isascii() and key.isdigit() for key in bias):
            raise ValueError("keys must be token ids")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> _Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Common):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None

    # Accepted because they change nothing here (docs/http-api.md says so).
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    parallel_tool_calls: StrictBool | None = None
    modalities: list[Literal["text"]] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value != {"type": "text"}:
            raise ValueError('only {"type": "text"} is supported yet')
        return value

    @field_validator("tools")
    @classmethod
    def _no_tools(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("tools are not supported yet")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _no_tool_choice(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError("tools are not supported yet")
        return value

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


TokenId = Annotated[StrictInt, Field(ge=0)]


class CompletionRequest(_Common):
    """Body of POST /v1/completions."""

    prompt: StrictStr | list[TokenId] | list[StrictStr] | list[list[TokenId]]
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("suffix is not supported")
        return value

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: only best_of equal to n is supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not supported together with logprobs")
        if not self.prompt:
            raise ValueError("prompt: must not be empty")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
