"""Bytes that a model's weights and contexts take, by the code that will allocate them, before a byte of weights is read.

The decoder is built of tensors without memory (torch's meta device), laid out as on the device. Weights that a CPU
packs into fewer bits count as they are while they are loaded, which is when most memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cache.codes import with_codes
from engine.cache.pages import (
    GPU_HEADROOM,
    blocks_of_a_sequence,
    bytes_of_passes,
    layout_of,
    page_parts,
    parts_of_stages,
)
from engine.cache.windows import with_windows
from engine.config import EngineConfig
from engine.kernels.device import meta_as_a_gpu
from engine.kernels.linear import computes_in_bfloat16
from engine.model.decoder import Decoder
from engine.parallel.group import Alone
from engine.resolving import read_config, resolve_dtype, resolve_max_model_len
from engine.spec.model import ModelSpec
from engine.spec.ranks import for_rank
from engine.spec.stages import FLAG, for_stage

MANY_BYTES = 1 << 50
LEAST_CONTEXT = 1024  # tokens; shorter ones are no help
STEP_TOKENS = 1024
RANKS = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a configuration, in bytes."""

    weights: int
    context: int  # KV of one sequence of `tokens`
    tokens: int  # the longest sequence
    passes: int  # activations and headroom on a card whose size was given

    @property
    def whole(self) -> int:
        """With one longest sequence."""
        return self.weights + self.context + self.passes


@dataclass(frozen=True, slots=True)
class Setting:
    """Another configuration, and how it is asked for."""

    flags: str
    needs: Needs


class _Counted(TorchDispatchMode):
    """Counts the storages that operations inside the context make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            reference = StorageWeakRef(storage)
            self._storages[reference.cdata] = reference, storage.nbytes()
        return made

    @property
    def num_bytes(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def needs(config: EngineConfig, *, total: int = 0, stages: int = 1) -> Needs:
    """The bytes of a configuration on a device with `total` bytes of memory, of the first of so many stages.

    Raises ValueError, OSError as an engine would.

    Not for models that transformers computes, and without drafts.
    """
    config = replace(config, draft=None)
    device = torch.device(config.device)
    model = read_config(config)
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    longest = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
    model = with_windows(with_codes(model, config.cache, dtype).within(longest), config.cache, dtype, longest)
    model = for_stage(model, 0, stages)
    group = Alone(size=config.tensor_parallel_size)  # a rank's share, the first one's
    own = for_rank(model, group.rank, group.size)
    cache, parts = replace(config.cache, num_blocks=None), page_parts(own, dtype)
    layout = layout_of(parts, cache, MANY_BYTES, stages=parts_of_stages(own, dtype))
    with nullcontext() if device.type == "cpu" else meta_as_a_gpu(), _Counted() as counted:
        decoder = Decoder(
            model, dtype=getattr(torch, dtype), device=torch.device("meta"), max_model_len=longest, group=group
        )
        decoder.weights.destinations.clear()  # with the plans of what exists only while it is loaded
        weights = counted.num_bytes
        del decoder
    return Needs(
        weights=weights + _packed_beside(model, dtype, device),
        context=blocks_of_a_sequence(layout, longest) * layout.block_bytes,
        tokens=longest,
        passes=0 if device.type == "cpu" else bytes_of_passes(model, config) + int(GPU_HEADROOM * total),
    )


def _packed_beside(model: ModelSpec, dtype: str, device: torch.device) -> int:
    """Bytes of a head that shares the embedding's table, and is packed beside it: other matrices are packed in place."""
    is_packed = device.type == "cpu" and dtype == "bfloat16" and computes_in_bfloat16()
    return 2 * model.vocab_size * model.hidden_size if is_packed and model.head.is_tied else 0


def nearest(config: EngineConfig, total: int, stages: int = 1) -> Setting | None:
    """The first other configuration that fits into `total` bytes with one longest sequence; None if none does.

    A quantised cache comes first, then a shorter context, quantised weights, and last more cards.
    """
    for flags, other, depth in _others(config, stages):
        try:
            found = needs(other, total=total, stages=depth)
        except (ValueError, OSError):
            continue
        if found.whole <= total:
            return Setting(flags, found)
        room = total - found.weights - found.passes
        tokens = int(found.tokens * max(0, room) / found.context) // STEP_TOKENS * STEP_TOKENS
        if not flags and tokens >= LEAST_CONTEXT:
            shorter = needs(replace(other, max_model_len=tokens), total=total, stages=stages)
            if shorter.whole <= total:
                return Setting(f"--max-model-len {tokens}", shorter)
    return None


def _others(config: EngineConfig, stages: int) -> Iterator[tuple[str, EngineConfig, int]]:
    """Configurations that need less, and their stages; the one as it is, for a shorter context, after those of the cache."""
    on_cpu = config.device == "cpu"
    kept = "int8" if on_cpu else "fp8"
    caches = [kept, "int4"] if config.cache.kv_cache_dtype == "auto" else []
    weights = (["int8"] if on_cpu else ["fp8", "int4"]) if config.quantization == "auto" else []
    for name in caches:
        yield f"--kv-cache-dtype {name}", replace(config, cache=replace(config.cache, kv_cache_dtype=name)), stages
    yield "", config, stages
    for quantization in weights:
        smaller = replace(config, quantization=quantization)
        yield f"--quantization {quantization}", smaller, stages
        for name in caches:
            both = replace(smaller, cache=replace(config.cache, kv_cache_dtype=name))
            yield f"--quantization {quantization} --kv-cache-dtype {name}", both, stages
    if on_cpu or config.tensor_parallel_size > 1:
        return
    for cards in RANKS:
        if stages == 1:
            yield f"--tensor-parallel-size {cards}", replace(config, tensor_parallel_size=cards), 1
        elif cards > stages:
            yield f"{FLAG} {cards}", config, cards
