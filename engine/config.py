"""The settings of an engine. Choices made at run time (dtype, number of blocks) are attributes of the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

# `kv_cache_dtype`, also by vLLM's names -> the quantised form. None: keys and values keep the model's compute dtype.
KV_CACHE_DTYPES: dict[str, Literal["float16", "fp8", "int8", "int4"] | None] = {
    "auto": None,
    "bfloat16": None,
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "int8": "int8",
    "int8_per_token_head": "int8",
    "int4": "int4",
    "int4_per_token_head": "int4",
    "float16": "float16",
    "float32": None,
}
SKIPPED_LAYERS = ("", "sliding_window")
MOST_GPUS = 8  # whose sums are known to fit (`engine.kernels.collectives`)


def _check_positive(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The operator's choices about the KV cache, whatever the model. Raises ValueError, naming the setting."""

    num_blocks: int | None = None  # None: as many as fit into kv_memory_bytes
    kv_memory_bytes: int | None = None  # None: 256 MiB, or the GPU memory left by weights and activations
    block_size: int | None = None  # token positions; None: what `engine.cache.pages.block_size` finds
    kv_cache_dtype: str = "auto"  # a key of `KV_CACHE_DTYPES`
    kv_cache_dtype_skip_layers: str = ""  # "sliding_window": those layers keep the compute dtype
    disable_hybrid_kv_cache_manager: bool = False  # vLLM's name; True: sliding-window layers have no separate blocks

    def __post_init__(self) -> None:
        _check_positive(self, ("num_blocks", "kv_memory_bytes", "block_size"))
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {self.kv_cache_dtype!r}")
        if self.kv_cache_dtype_skip_layers not in SKIPPED_LAYERS:
            raise ValueError(
                f"kv_cache_dtype_skip_layers must be sliding_window or nothing, not {self.kv_cache_dtype_skip_layers!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The drafts that the engine's passes verify, and the head or model that it drafts them with. Raises ValueError."""

    folder: Path | None = None  # `EngineConfig.model` for the model's own layer; None: drafted outside of the engine
    is_model: bool = False
    num_drafts: int = 0  # most tokens of a draft

    def __post_init__(self) -> None:
        if self.num_drafts < 0:
            raise ValueError(f"num_drafts must be 0 or more, not {self.num_drafts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings for one model on one device. Raises ValueError for a limit that is not positive.

    With dtype "auto" it computes in the checkpoint's dtype; on a CPU in float32, unless both have bfloat16.
    """

    model: Path  # folder with config.json and safetensors
    device: str = "cpu"
    dtype: str = "auto"  # "auto", "float32", "bfloat16" or "float16"
    cache: CacheConfig = CacheConfig()
    max_model_len: int | None = None  # None: the model's, up to 2^20
    max_batch_tokens: int = 512  # token budget of a pass
    max_sequences: int = 64
    num_threads: int = 1  # torch's intra-op threads on the CPU
    model_impl: str = "auto"  # which code computes the model, see `engine.foreign`
    quantization: str = "auto"  # online quantisation of plain weights, see `engine.families.quantised`
    draft: DraftConfig | None = None
    tensor_parallel_size: int = 1  # ranks that share the model
    enable_expert_parallel: bool = True  # ranks have some experts, whole; False: a part of every expert

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """The configuration of settings by name, those of the KV cache beside the others."""
        cache = {field.name: settings.pop(field.name) for field in fields(CacheConfig) if field.name in settings}
        return cls(**settings, cache=CacheConfig(**cache))

    def with_pool(self, num_blocks: int, block_size: int) -> EngineConfig:
        """The same settings with a pool of this size, whatever memory is free."""
        cache = replace(self.cache, num_blocks=num_blocks, block_size=block_size, kv_memory_bytes=None)
        return replace(self, cache=cache)

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "max_batch_tokens", "max_sequences", "num_threads", "tensor_parallel_size")
        _check_positive(self, sizes)
        if self.tensor_parallel_size > 1:
            self._check_ranks()
        if self.model_impl not in ("auto", "baton", "transformers"):
            raise ValueError(f"model_impl must be auto, baton or transformers, not {self.model_impl!r}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}")
        if self.cache.kv_cache_dtype == "float16" and self.device.startswith("cuda") and self.dtype != "float16":
            raise ValueError("kv_cache_dtype = float16 is for CPUs, or for dtype = float16: leave it out, or take fp8")
        if self.quantization == "int8" and self.device != "cpu":
            raise ValueError(f"quantization = 'int8' is for CPUs, not {self.device}: take fp8")

    def check_stages(self, count: int, *, is_foreign: bool) -> None:
        """Raise ValueError for settings that so many stages don't have yet. `is_foreign`: `transformers` computes the model."""
        if count == 1:
            return
        if is_foreign:
            refused, remedy = "transformers computes a model whole", "a model of Baton's families"
        else:
            return
        raise ValueError(f"--pipeline-parallel-size {count}: {refused}: {remedy}, or take 1")

    def _check_ranks(self) -> None:
        """Raise ValueError for settings that ranks don't have yet."""
        if self.model_impl == "transformers":
            refused, remedy = "transformers computes a model whole", "leave --model-impl out"
        elif self.device != "cpu" and self.tensor_parallel_size > MOST_GPUS:
            refused, remedy = (
                f"at most {MOST_GPUS} GPUs share a layer",
                f"take {MOST_GPUS}, beside --pipeline-parallel-size for more GPUs",
            )
        else:
            return
        raise ValueError(f"--tensor-parallel-size {self.tensor_parallel_size}: {refused}: {remedy}, or take 1")
