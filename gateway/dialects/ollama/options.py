"""`options`: how a client wants tokens chosen, and what it says of a machine that isn't here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictInt

from common.messages import SamplingParams
from gateway.dialects.foreign import Foreign, TranslatedFields, ignored, refused
from gateway.dialects.stops import Stops
from gateway.http.fields import Number, Whole

RANDOM_SEED = -1
# Ollama's name -> ours.
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
_NO_SAMPLER = "not supported; top_p, top_k, min_p, typical_p and penalties are"


class OllamaOptions(TranslatedFields):
    """`options` of a request."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        **ignored(
            "workers decide about their machines",
            "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "low_vram",
            "numa", "f16_kv", "vocab_only", "logits_all", "embedding_only",
        ),
        **ignored("penalties look at the whole text", "repeat_last_n", "penalize_newline"),
        **ignored("this only shapes a sampler that is refused", "mirostat_tau", "mirostat_eta"),
        **refused(_NO_SAMPLER, "mirostat"),
        **refused(_NO_SAMPLER, "tfs_z", off=(False, 1)),
    }  # fmt: skip

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    num_predict: Annotated[Whole, Field(ge=-2, lt=2**31)] | None = None
    stop: Stops | None = None

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """How to choose tokens, as far as the options say. With -1 or -2, or without a bound, an answer may fill the context."""
        given: dict[str, Any] = {
            ours: float(value)
            for name, ours in SAMPLING.items()
            if name != "top_k" and (value := getattr(self, name)) is not None
        }
        most = max(0, self.num_predict or 0)
        return SamplingParams(**given, top_k=max(0, self.top_k or 0), logprobs=logprobs, max_tokens=most)

    @property
    def left_open(self) -> frozenset[str]:
        """Our fields that the options don't give."""
        return frozenset(ours for name, ours in SAMPLING.items() if getattr(self, name) is None)

    @property
    def wanted_seed(self) -> int | None:
        return None if self.seed is None or self.seed == RANDOM_SEED else self.seed % 2**64
