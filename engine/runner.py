"""One forward pass after another on one device, without waiting for it: inputs in one copy, decoding in captured graphs.

A pass that decodes, computes one short prompt, or both, replays the CUDA graph of the next size up; every other pass is launched
kernel by kernel, which takes the host as long as a GPU computes on a few hundred tokens of an 8B model. Inputs live in one device
buffer that the passes use in turn: the device's stream orders a pass's copy behind the pass before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from engine.batch import (
    GRAPH_CONTEXT,
    GRAPH_PROMPTS,
    BlockTables,
    ForwardBatch,
    GraphSize,
    Limits,
    Packed,
    decodes,
    graph_layout,
    pack,
    unpack,
    unpack_graph,
)
from engine.kernels.attention import copies_in_bulk
from engine.models.decoder import Decoder
from engine.newest import NewestTokens
from engine.sequence import Chunk

MEASURED_PASSES = 3
STAGING_BUFFERS = 3  # passes whose inputs may be on their way at once: two in flight, one being packed


@dataclass(slots=True)
class _Staging:
    """Pinned host memory that a copy may still read until `copied`."""

    buffer: torch.Tensor  # [n] int32
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class Runner:
    """Owns a device's input buffers and graphs. One thread at a time."""

    def __init__(
        self, decoder: Decoder, kv: torch.Tensor, limits: Limits, *, max_tokens: int, max_sequences: int
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._limits = limits
        self._device = kv.device
        self._tables = BlockTables(
            max_blocks=-(-limits.max_model_len // limits.block_size),
            num_blocks=limits.num_blocks,
            num_rows=2 * max_sequences,
        )
        self._logits: torch.Tensor | None = None  # [largest graph, V]: every graph's result, one at a time
        self._stagings = [_Staging(self._pinned(1 << 16)) for _ in range(STAGING_BUFFERS)]
        room = (1 << 16) + (2 * max_sequences + GRAPH_PROMPTS) * self._tables.max_blocks  # all that graphs read
        self._inputs = torch.zeros(room, dtype=torch.int32, device=self._device)
        self._newest = torch.zeros(max(max_sequences, max_tokens), dtype=torch.int64, device=self._device)
        self._graphs: dict[GraphSize, torch.cuda.CUDAGraph] = {}
        self._sizes: list[GraphSize] = []  # by what they cost

    @torch.inference_mode()
    def forward(self, chunks: SequenceOf[Chunk], newest: NewestTokens) -> torch.Tensor | None:
        """Launch one pass over the chunks, decoding ones first. Returns the logits [R, V] of those that sample.

        The logits may be overwritten by the next pass. Raises InvalidChunkError before anything was launched.
        """
        size = self._graph_size(chunks)
        packed = pack(chunks, newest, self._tables, self._limits, room=size)
        inputs = self._upload(packed)
        if size is not None:
            self._graphs[size].replay()
            assert self._logits is not None
            num_sampled = sum(chunk.sample for chunk in chunks)
            return self._logits[:num_sampled] if num_sampled else None
        return self._decoder.forward(unpack(packed, inputs, self._newest, chunks, self._limits), self._kv)

    def keep_newest(self, token_ids: torch.Tensor) -> None:
        """Make `token_ids` [R] int64 what the next pass may begin with."""
        self._newest[: len(token_ids)].copy_(token_ids)

    @torch.inference_mode()
    def rehearse(self, sizes: SequenceOf[GraphSize]) -> None:
        """Launch what `capture` will, kernel by kernel."""
        for _, batch in self._empty_passes(sizes):
            self._decoder.forward(batch, self._kv)

    @torch.inference_mode()
    def capture(self, sizes: SequenceOf[GraphSize]) -> None:
        """Capture a pass of each size, in one memory pool; those with prompts only where attention copies in bulk."""
        pool = None
        for size, batch in self._empty_passes(sizes):
            logits = self._decoder.forward(batch, self._kv)  # the first one of a kind does more than launch
            assert logits is not None
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._decoder.forward(batch, self._kv, logits=self._logits[: size.num_sampled])
            pool = pool or graph.pool()
            self._graphs[size] = graph
        self._sizes = sorted(self._graphs, key=lambda size: (size.tokens, size.decoding))

    def _empty_passes(self, sizes: SequenceOf[GraphSize]) -> Iterator[tuple[GraphSize, ForwardBatch]]:
        wanted = [size for size in sizes if not size.prompts or copies_in_bulk(self._kv)]
        for size in sorted(wanted, key=lambda size: (size.num_sampled, size.tokens), reverse=True):
            packed = graph_layout(size, self._limits)
            yield size, unpack_graph(packed, size, self._upload(packed), self._newest, self._limits)

    @torch.inference_mode()
    def measure(self) -> dict[GraphSize, float]:
        """Milliseconds of each captured pass that decodes, empty but for the products: what more tokens in it cost."""
        times = {}
        for size in self._sizes:
            if not size.decoding:
                continue
            self._upload(graph_layout(size, self._limits))
            began, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._graphs[size].replay()
            began.record()
            for _ in range(MEASURED_PASSES):
                self._graphs[size].replay()
            over.record()
            over.synchronize()
            times[size] = began.elapsed_time(over) / MEASURED_PASSES
        return times

    def _graph_size(self, chunks: SequenceOf[Chunk]) -> GraphSize | None:
        """The smallest graph that holds the pass; None if there is none."""
        decoding = [chunk for chunk in chunks if decodes(chunk)]
        prompts = chunks[len(decoding) :]
        tokens = sum(chunk.num_tokens for chunk in prompts)
        num_blocks = sum(-(-chunk.end // self._limits.block_size) for chunk in prompts)
        if len(prompts) > GRAPH_PROMPTS or num_blocks > GRAPH_CONTEXT // self._limits.block_size:
            return None
        if not all(chunk.sample for chunk in decoding):
            return None
        is_whole = len(prompts) == 1 and not prompts[0].start
        for size in self._sizes:
            if size.decoding < len(decoding) or size.prompts < tokens or bool(size.prompts) != bool(prompts):
                continue
            if size.decoding or is_whole:
                return size
        return None

    def _upload(self, packed: Packed) -> torch.Tensor:
        """Copy the inputs to the device; returns the buffer that holds them."""
        staging = self._stagings.pop(0)
        self._stagings.append(staging)
        staging.wait()
        if packed.size > len(staging.buffer):
            staging.buffer = self._pinned(2 * packed.size)
        packed.write(staging.buffer.numpy())
        inputs = self._inputs
        if packed.size > len(inputs):
            inputs = torch.empty(packed.size, dtype=torch.int32, device=self._device)
        inputs[: packed.size].copy_(staging.buffer[: packed.size], non_blocking=True)
        if self._device.type == "cuda":
            staging.copied = torch.cuda.Event()
            staging.copied.record()
        return inputs

    def _pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
