"""The engine: a model, its KV pool and a sampler behind one call, `step`.

It knows nothing of requests' lives: schedulers decide what a step computes, the worker's loop applies what comes back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.messages import KVLayout
from engine.batch import Chunk, InvalidChunkError, build_batch
from engine.config import EngineConfig
from engine.kv_cache import allocate_zeros, plan_layout, pool_shape
from engine.loader import load_weights, model_fingerprint
from engine.models.config import read_decoder_config
from engine.models.decoder import Decoder
from engine.sampler import Sampled, sample

__all__ = ["Chunk", "Engine", "InvalidChunkError", "Sampled"]

Allocate = Callable[[tuple[int, ...], torch.dtype, str], torch.Tensor]


class Engine:
    """Loads a model on construction. `step` is called by one thread at a time, which need not be the constructing one.

    `allocate(shape, dtype, device)` provides the pool's memory (a transport's, so that peers can reach it); it need not
    be initialised.
    """

    def __init__(self, config: EngineConfig, *, allocate: Allocate | None = None) -> None:
        decoder_config = read_decoder_config(config.model)
        device = torch.device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        dtype_name = _resolve_dtype(config.dtype, device, decoder_config.dtype)
        dtype = getattr(torch, dtype_name)
        self.config = config
        self.vocab_size = decoder_config.vocab_size
        self.max_model_len = _resolve_max_model_len(config.max_model_len, decoder_config.max_position_embeddings)
        self.fingerprint = model_fingerprint(config.model)
        self.layout: KVLayout = plan_layout(decoder_config, config, dtype_name)
        self._decoder = Decoder(decoder_config, dtype=dtype, device=device, max_model_len=self.max_model_len)
        load_weights(self._decoder, config.model)
        self.kv = (allocate or allocate_zeros)(pool_shape(self.layout), dtype, config.device)

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> list[Sampled | None]:
        """Compute the chunks in one forward pass; return one result for each, in order.

        None for a chunk with `sample=False`. None for one with `sample=True` says that the model gave no usable logits
        (NaN or infinity) for this sequence: fail that request, the others are not affected. Sequences are not changed;
        the caller advances `num_computed` and appends the token.

        Raises InvalidChunkError before anything was computed when a chunk contradicts its sequence or the pool.
        """
        if not chunks:
            return []
        batch = build_batch(
            chunks,
            block_size=self.layout.block_size,
            num_blocks=self.layout.num_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            device=self.kv.device,
        )
        logits = self._decoder.forward(batch, self.kv)
        if logits is None:
            return [None] * len(chunks)
        sampled = iter(sample(logits, [chunk.sequence for chunk in chunks if chunk.sample]))
        return [next(sampled) if chunk.sample else None for chunk in chunks]


def _resolve_dtype(asked: str, device: torch.device, checkpoint: str) -> str:
    if asked != "auto":
        return asked
    return "float32" if device.type == "cpu" else checkpoint


def _resolve_max_model_len(asked: int | None, model: int) -> int:
    if asked is not None and asked > model:
        raise ValueError(f"max_model_len = {asked} is more than the model's max_position_embeddings = {model}")
    return asked or model
