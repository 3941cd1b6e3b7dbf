"""The settings of an engine. Choices made at run time (dtype, number of blocks) are attributes of the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

# `kv_cache_dtype`, also by vLLM's names -> the quantised form. None: keys and values keep the model's compute dtype.
KV_CACHE_DTYPES: dict[str, Literal["fp8", "int8", "int4"] | None] = {
    "auto": None,
    "bfloat16": None,
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "int8": "int8",
    "int8_per_token_head": "int8",
    "int4": "int4",
    "int4_per_token_head": "int4",
}
SKIPPED_LAYERS = ("", "sliding_window")


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

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """The configuration of settings by name, those of the KV cache beside the others."""
        cache = {field.name: settings.pop(field.name) for field in fields(CacheConfig) if field.name in settings}
        return cls(**settings, cache=CacheConfig(**cache))

    def __post_init__(self) -> None:
        _check_positive(self, ("max_model_len", "max_batch_tokens", "max_sequences", "num_threads"))
        if self.model_impl not in ("auto", "baton", "transformers"):
            raise ValueError(f"model_impl must be auto, baton or transformers, not {self.model_impl!r}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}")
        if self.quantization == "int8" and self.device != "cpu":
            raise ValueError(f"quantization = 'int8' is for CPUs, not {self.device}: take fp8")
