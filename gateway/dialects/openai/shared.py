"""The shared fields of chat and completions, and those of other servers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from common.messages import Keep
from gateway.dialects.drafts import Drafted
from gateway.dialects.foreign import TranslatedFields
from gateway.dialects.openai.formats import FOLLOWED, RESPONSE_FORMAT_SCHEMA, STRUCTURED_SCHEMA, wanted_of
from gateway.dialects.stops import STOPS_SCHEMA, Stops
from gateway.grammars.wanted import Wanted
from gateway.http.fields import Count, Metadata, Number, StrictFields, TokenId
from gateway.tenants.tenants import GoalFields

_A_DAY_S = 86_400.0
MAX_LOGIT_BIAS = 1_024
MAX_N = 16
MAX_LOGPROBS = 20
MAX_ALLOWED = 16_384
MAX_BAD_WORDS = 512
MAX_PREDICTED_PARTS = 256

BadWord = Annotated[StrictStr, Field(min_length=1, max_length=256)]
Label = Annotated[StrictStr, Field(max_length=1_024)]

# Known unsupported fields: refused with these messages unless they are off.
UNSUPPORTED = {
    "logits_processors": "", "use_beam_search": "",
}  # fmt: skip
# OpenAI's and vLLM's fields that are ignored, whatever their value.
INERT = frozenset({"request_id", "spaces_between_special_tokens", "guided_decoding_backend"})
_TIERS = ("auto", "default", "flex", "scale", "priority")

# JSON schemas of fields that are validated in code.
_NULL = {"type": "null"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "stop": STOPS_SCHEMA,
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


class StreamOptions(StrictFields):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # vLLM's: usage in every chunk
    include_timings: StrictBool = False  # llama.cpp's `timings` in the last chunk
    include_obfuscation: StrictBool = False  # accepted: Baton never pads chunks


class PredictedPart(StrictFields):
    type: Literal["text"]
    text: StrictStr


class Prediction(StrictFields):
    """OpenAI's Predicted Outputs: a text that much of the answer will repeat."""

    type: Literal["content"]
    content: StrictStr | Annotated[list[PredictedPart], Field(max_length=MAX_PREDICTED_PARTS)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class CommonFields(GoalFields, TranslatedFields):
    """Fields shared by chat and completions."""

    inert: ClassVar[frozenset[str]] = INERT
    schemas: ClassVar[dict[str, dict[str, Any]]] = SCHEMAS

    model: StrictStr  # "": the default model
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None

    # Accepted and ignored (docs/http-api.md).
    user: Label | None = None
    metadata: Metadata | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: Label | None = None

    # Wishes for the cached KV.
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    # Fields of vLLM and others, not OpenAI's.
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
    speculation: Drafted | None = None
    prediction: Prediction | None = None

    # Constraints on the answer: at most one of them.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    guided_whitespace_pattern: StrictStr | None = None
    regex: StrictStr | None = None  # SGLang's, as the next
    ebnf: StrictStr | None = None
    grammar: dict[str, Any] | StrictStr | None = None  # llama.cpp's text, or TGI's object
    json_schema: dict[str, Any] | StrictStr | None = None
    _grammar: Wanted | None = PrivateAttr(default=None)

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
        self._grammar = wanted_of({name: getattr(self, name) for name in FOLLOWED} | self.other_formats)
        return self

    @property
    def other_formats(self) -> dict[str, Any]:
        """Formats in a dialect's own fields, by name."""
        return {}

    @property
    def keep(self) -> Keep:
        """The wish for the cached KV, as far as it is said."""
        ttl_s = _A_DAY_S if self.prompt_cache_retention == "24h" else 0.0
        return Keep(ttl_s=ttl_s)

    @property
    def followed(self) -> Wanted | None:
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
