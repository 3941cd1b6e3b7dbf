"""Sampling fields under llama.cpp's names, shared with Ollama's options."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt

from common.messages import SamplingParams
from gateway.dialects.drafts import Drafted
from gateway.dialects.foreign import TranslatedFields
from gateway.http.fields import Number, Whole

RANDOM_SEED = -1
NO_SAMPLER = "not supported; top_p, top_k, min_p, typical_p and penalties are"
# llama.cpp's name -> ours.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class LocalSamplingFields(TranslatedFields):
    """Sampling parameters. Absent ones are left to the model."""

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    speculation: Drafted | None = None

    def sampled(self, **more: Any) -> SamplingParams:
        """Return the body's sampling parameters, with `more` of its fields."""
        given: dict[str, Any] = {
            ours: float(value)
            for name, ours in SAMPLING.items()
            if name != "top_k" and (value := getattr(self, name)) is not None
        }
        return SamplingParams(**given, top_k=max(0, self.top_k or 0), **more)

    @property
    def left_open(self) -> frozenset[str]:
        """Our fields that are absent from the body."""
        return frozenset(ours for name, ours in SAMPLING.items() if getattr(self, name) is None)

    @property
    def wanted_seed(self) -> int | None:
        return None if self.seed is None or self.seed == RANDOM_SEED else self.seed % 2**64
