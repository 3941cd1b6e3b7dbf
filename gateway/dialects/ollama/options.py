"""`options`: sampling parameters, and settings of a local machine, which don't apply here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from common.messages import SamplingParams
from gateway.dialects.foreign import Foreign, ignored, refused
from gateway.dialects.local_sampling import NO_SAMPLER, LocalSamplingFields
from gateway.dialects.stops import Stops
from gateway.http.fields import Whole


class OllamaOptions(LocalSamplingFields):
    """`options` of a request."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        **ignored(
            "workers decide about their machines",
            "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "low_vram",
            "numa", "f16_kv", "vocab_only", "logits_all", "embedding_only",
        ),
        **ignored("penalties look at the whole text", "repeat_last_n", "penalize_newline"),
        **ignored("this only shapes a sampler that is refused", "mirostat_tau", "mirostat_eta"),
        **refused(NO_SAMPLER, "mirostat"),
        **refused(NO_SAMPLER, "tfs_z", off=(False, 1)),
    }  # fmt: skip

    num_predict: Annotated[Whole, Field(ge=-2, lt=2**31)] | None = None
    stop: Stops | None = None

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """Sampling parameters, as far as the options have them. With -1, -2 or no limit an answer may fill the context."""
        return self.sampled(logprobs=logprobs, max_tokens=max(0, self.num_predict or 0))
