"""TGI's bodies, field by field. Unsupported values are refused by name."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, StrictStr, model_validator

from gateway.dialects.drafts import Drafted
from gateway.dialects.openai.formats import wanted_of
from gateway.dialects.stops import STOPS_SCHEMA, Stops
from gateway.grammars.wanted import Wanted
from gateway.http.fields import Count, Number, StrictFields

MAX_BEST_OF = 16
MAX_TOP_TOKENS = 20
USUAL_NEW_TOKENS = 100

Share = Annotated[Number, Field(gt=0, le=1)]
_GRAMMAR: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {"type": {"enum": ["json", "json_object"]}, "value": {"type": ["object", "string"]}},
            "required": ["type", "value"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "regex"}, "value": {"type": "string"}},
            "required": ["type", "value"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "value": {"type": "object", "properties": {"schema": {"type": "object"}}},
            },
            "required": ["type", "value"],
        },
    ]
}


class TgiParameters(StrictFields):
    """Sampling parameters, and requested details."""

    unsupported: ClassVar[dict[str, str]] = {
        "watermark": "not supported",
        "adapter_id": "no adapters are served: name a model of /v1/models in `model`",
    }
    schemas: ClassVar[dict[str, dict[str, Any]]] = {"grammar": _GRAMMAR, "stop": STOPS_SCHEMA}

    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_BEST_OF)] | None = None
    decoder_input_details: StrictBool = False
    details: StrictBool = False
    do_sample: StrictBool = False
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    grammar: dict[str, Any] | None = None
    max_new_tokens: Annotated[Count, Field(ge=1)] = USUAL_NEW_TOKENS
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    return_full_text: StrictBool | None = None
    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    speculation: Drafted | None = None
    stop: Stops | None = None
    temperature: Annotated[Number, Field(gt=0, le=100)] | None = None
    top_k: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    top_n_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_TOKENS)] | None = None
    top_p: Share | None = None
    truncate: Annotated[StrictInt, Field(ge=1)] | None = None
    typical_p: Share | None = None
    _wanted: Wanted | None = PrivateAttr(default=None)
    _drawn: int = PrivateAttr(default_factory=lambda: secrets.randbits(64))

    @model_validator(mode="after")
    def _combinations(self) -> TgiParameters:
        if self.best_of_several and self.seed is not None:
            raise ValueError("seed: not together with best_of above 1")
        if self.best_of_several and not self.samples:
            raise ValueError(
                "best_of: above 1 only with do_sample, or a temperature, top_k, top_p or typical_p that samples"
            )
        self._wanted = wanted_of({"grammar": self.grammar})
        return self

    @property
    def best_of_several(self) -> bool:
        return (self.best_of or 1) > 1

    @property
    def samples(self) -> bool:
        """True if tokens are sampled: TGI is greedy by default."""
        shaped = (self.temperature, self.top_p, self.typical_p)
        return self.do_sample or self.top_k is not None or any(value not in (None, 1) for value in shaped)

    @property
    def used_seed(self) -> int | None:
        """The seed that answers report; None for greedy decoding."""
        if not self.samples:
            return None
        return self._drawn if self.seed is None else self.seed

    @property
    def tells_tokens(self) -> bool:
        return self.details or self.decoder_input_details

    @property
    def wanted(self) -> Wanted | None:
        """The grammar of the answer."""
        return self._wanted


class TgiRequest(StrictFields):
    """Body of POST /generate, /generate_stream and /. `model`: the default one if absent."""

    model: StrictStr = ""
    inputs: Annotated[StrictStr, Field(min_length=1)]
    parameters: TgiParameters = Field(default_factory=lambda: TgiParameters(do_sample=True))  # TGI's default
    stream: StrictBool = False
    options: dict[str, Any] | None = None  # caching and waiting in the hosted API

    @property
    def ignored(self) -> tuple[str, ...]:
        return ("options",) if self.options else ()
