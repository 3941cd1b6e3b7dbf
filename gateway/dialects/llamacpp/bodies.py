"""The bodies of completion and infill. Unsupported values are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

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

from common.messages import NO_KEEP, Keep, SamplingParams
from gateway.answers.start import MAX_SEQUENCES
from gateway.dialects.drafts import DRAFTED_SCHEMA, at_most_drafted
from gateway.dialects.foreign import EMPTY, Foreign, as_ours, ignored, refused
from gateway.dialects.llamacpp.prompts import Prompts, prompts_of
from gateway.dialects.local_sampling import NO_SAMPLER, LocalSamplingFields
from gateway.dialects.stops import MAX_STOPS, STOP_SCHEMA, Stops
from gateway.grammars import wanted
from gateway.grammars.wanted import Wanted
from gateway.http.fields import MAX_TOKEN_IDS, StrictFields, Whole, ids_read

MAX_PROBS = 20
MAX_FILES = 256
MAX_BIASES = 1_024
BANNED = -1e9  # as a bias
FOREIGN: dict[str, Foreign] = {
    **as_ours("n_predict", "max_tokens", schema={"type": ["integer", "null"]}),
    **ignored(
        "one KV cache serves all requests, and forgets by itself",
        "cache_prompt", "n_keep", "n_discard", "n_cache_reuse",
    ),
    **ignored(
        "samplers have one order, and penalties look at the whole text",
        "samplers", "min_keep", "repeat_last_n", "n_indent",
    ),
    **ignored(
        "this only shapes a sampler that is refused",
        "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
        "xtc_threshold", "dynatemp_exponent", "adaptive_decay",
    ),
    **as_ours("speculation", "speculative.n_max", schema=DRAFTED_SCHEMA, means=at_most_drafted),
    **ignored("as many tokens are drafted as pay", "speculative.n_min", "speculative.p_min"),
    **ignored("an answer has what is documented here", "return_progress"),
    **refused(NO_SAMPLER, "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"),
    **refused(NO_SAMPLER, "top_n_sigma", "adaptive_target", off=(*EMPTY, -1)),
    **refused("probabilities are told as the model gives them", "post_sampling_probs"),
    **refused("no adapters are served: name a model of /v1/models", "lora"),
    **refused("not supported", "grammar_lazy", "grammar_triggers", "preserved_tokens"),
    **refused("there is no such clock", "t_max_predict_ms", "t_max_prompt_ms", off=(*EMPTY, -1)),
    **refused("only text is read", "image_data"),
}  # fmt: skip
_SCHEMAS: dict[str, dict[str, Any]] = {
    "stop": {"anyOf": [STOP_SCHEMA, {"type": "array", "maxItems": MAX_STOPS, "items": STOP_SCHEMA}, {"type": "null"}]},
    "logit_bias": {
        "anyOf": [{"type": "array", "maxItems": MAX_BIASES, "items": {}}, {"type": "object"}, {"type": "null"}]
    },
}


class LlamaRequest(LocalSamplingFields):
    """The common fields of both."""

    foreign: ClassVar[Mapping[str, Foreign]] = FOREIGN
    schemas: ClassVar[dict[str, dict[str, Any]]] = _SCHEMAS

    model: StrictStr = ""  # the first served one
    stream: StrictBool = False
    n_predict: Annotated[Whole, Field(ge=-2, lt=2**31)] | None = None
    n_cmpl: Annotated[StrictInt, Field(ge=1, le=MAX_SEQUENCES)] = 1
    stop: Stops | None = None
    logit_bias: Any = None
    ignore_eos: StrictBool = False
    grammar: StrictStr = ""
    json_schema: dict[str, Any] | None = None
    n_probs: Annotated[StrictInt, Field(ge=0, le=MAX_PROBS)] = 0
    return_tokens: StrictBool = False
    timings_per_token: StrictBool = False
    id_slot: Annotated[StrictInt, Field(ge=-1, le=1_023)] = -1  # names a session
    response_fields: Annotated[list[StrictStr], Field(max_length=64)] | None = None
    _followed: Wanted | None = PrivateAttr(default=None)

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, said: Any) -> dict[int, float]:
        pairs = list(said.items()) if isinstance(said, dict) else said
        if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
            raise ValueError(f"must be a list of at most {MAX_BIASES} pairs of a token's id and its bias")
        return dict(map(_bias, pairs))

    @model_validator(mode="after")
    def _follows_one_thing(self) -> LlamaRequest:
        if self.grammar and self.json_schema is not None:
            raise ValueError("json_schema: an answer can't follow grammar as well: send one of them")
        if self.grammar:
            self._followed = wanted.ebnf("grammar", self.grammar)
        elif self.json_schema is not None:
            self._followed = wanted.json_schema("json_schema", self.json_schema)
        return self

    @property
    def followed(self) -> Wanted | None:
        """The grammar or schema that the answer must follow."""
        return self._followed

    @property
    def most_tokens(self) -> int:
        """Maximum new tokens. 0: up to the context, for -1 and -2."""
        return max(0, self.n_predict or 0)

    @property
    def keep(self) -> Keep:
        return Keep(session=f"slot-{self.id_slot}") if self.id_slot >= 0 else NO_KEEP

    @property
    def is_wanted(self) -> bool:
        """True if any text is wanted: with 0 tokens only the prompt is computed."""
        return self.n_predict != 0

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters, as far as the body has them."""
        return self.sampled(
            logit_bias=self.logit_bias or {}, logprobs=self.n_probs or None, max_tokens=self.most_tokens
        )


class LlamaCompletionRequest(LlamaRequest):
    """Body of POST /completion."""

    many: ClassVar[Mapping[str, int]] = {"prompt": MAX_TOKEN_IDS}
    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        **_SCHEMAS,
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {}}, {"type": "object"}]},
    }

    prompt: Any  # a validator makes it a list of prompts

    @field_validator("prompt")
    @classmethod
    def _list_of_prompts(cls, prompt: Any, info: ValidationInfo) -> Prompts:
        return prompts_of(prompt if (ids := ids_read(info)) is None else ids)


class ExtraFile(StrictFields):
    """A file of the same project."""

    filename: Annotated[StrictStr, Field(max_length=1_024)] = "file"
    text: StrictStr


class InfillRequest(LlamaRequest):
    """Body of POST /infill."""

    input_prefix: StrictStr = ""
    input_suffix: StrictStr = ""
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES)] = Field(default_factory=list)
    prompt: StrictStr = ""

    @model_validator(mode="after")
    def _has_context(self) -> InfillRequest:
        if not (self.input_prefix or self.input_suffix or self.prompt):
            raise ValueError("input_prefix: nothing stands around the text: send it, or input_suffix")
        return self


def _bias(pair: Any) -> tuple[int, float]:
    """Raises ValueError."""
    match pair:
        case [str(text), _] if not text.isdecimal():
            raise ValueError("tokens are named by their ids: /tokenize tells them")
        case [bool(), _]:
            pass
        case [int() | str() as token, False] if int(token) >= 0:
            return int(token), BANNED
        case [int() | str() as token, int() | float() as bias] if int(token) >= 0 and not isinstance(bias, bool):
            return int(token), float(bias)
    raise ValueError("a bias is a pair of a token's id and a number, or false")
