"""The engine: a model, its KV pool and a sampler behind one call, `launch`.

It knows nothing of requests' lives: schedulers decide what a pass computes, the worker's loop applies what comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.messages import KVLayout
from engine.batch import Limits
from engine.config import EngineConfig
from engine.kv_cache import allocate_zeros, plan_layout, pool_shape
from engine.loader import load_weights, model_fingerprint
from engine.models.config import read_decoder_config
from engine.models.decoder import Decoder
from engine.passes import Finished, InvalidChunkError, Pass, Sampled
from engine.runner import Runner
from engine.sampler import SampledRow, sample
from engine.sequence import Chunk, Sequence

__all__ = ["Chunk", "Engine", "InvalidChunkError", "Pass", "Sampled"]

Allocate = Callable[[tuple[int, ...], torch.dtype, str], torch.Tensor]


class Engine:
    """Loads a model on construction. `launch` is called by one thread at a time, which need not be the constructing one.

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
        limits = Limits(
            block_size=self.layout.block_size,
            num_blocks=self.layout.num_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_heads=self.layout.num_kv_heads,
            windows=tuple(sorted(set(decoder_config.windows))),
        )
        self._runner = Runner(
            self._decoder, self.kv, limits, max_tokens=config.max_batch_tokens, max_sequences=config.max_sequences
        )
        self._newest = _Newest({}, {})
        if device.type == "cuda":
            self._runner.capture(_graph_sizes(config.max_sequences))

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk]) -> Pass:
        """Start one forward pass over the chunks. Sequences are not changed: that is the caller's, by `Pass.wait`.

        Passes are computed in the order of their launch. A chunk may begin with the token that the pass launched directly
        before it samples for the same sequence, before anybody knows that token (`Sequence.num_pending`).

        Raises InvalidChunkError before anything was computed when a chunk contradicts its sequence or the pool.
        """
        if not chunks:
            return Finished([])
        order = sorted(
            range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1
        )  # decoding first, else as given
        ordered = [chunks[index] for index in order]
        logits = self._runner.forward(ordered, self._newest)
        sampling = [chunk for chunk in ordered if chunk.sample]
        rows = [SampledRow.of(chunk, self._newest.tokens) for chunk in sampling]
        sampled = sample(logits.float(), rows) if logits is not None else []
        tokens = [result.token_id if result else 0 for result in sampled]
        self._runner.keep_newest(torch.tensor(tokens, dtype=torch.int64))
        self._newest = _Newest(
            {chunk.sequence: row for row, chunk in enumerate(sampling)},
            {chunk.sequence: token for chunk, token in zip(sampling, tokens, strict=True)},
        )
        by_sequence = dict(zip([chunk.sequence for chunk in sampling], sampled, strict=True))
        return Finished([by_sequence[chunk.sequence] if chunk.sample else None for chunk in chunks])


@dataclass(frozen=True, slots=True)
class _Newest:
    """Which sequences the last pass sampled a token for."""

    rows: dict[Sequence, int]
    tokens: dict[Sequence, int]

    def row_of(self, sequence: Sequence) -> int | None:
        return self.rows.get(sequence)


def _graph_sizes(max_sequences: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the largest is at least `max_sequences`."""
    sizes = [1, 2, 4]
    while sizes[-1] < max_sequences:
        size = sizes[-1]
        sizes.append(size + (4 if size < 8 else 8 if size < 64 else 16 if size < 256 else 32))
    return sizes


def _resolve_dtype(asked: str, device: torch.device, checkpoint: str) -> str:
    if asked != "auto":
        return asked
    return "float32" if device.type == "cpu" else checkpoint


def _resolve_max_model_len(asked: int | None, model: int) -> int:
    if asked is not None and asked > model:
        raise ValueError(f"max_model_len = {asked} is more than the model's max_position_embeddings = {model}")
    return asked or model
