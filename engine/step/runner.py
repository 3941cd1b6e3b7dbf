"""Execution of forward passes on one device, without waiting for it: inputs in one copy, decoding in CUDA graphs.

Packing needs a pass's sequences, executing only the packed words: with several ranks, the first one packs and all execute.

A pass that decodes, computes one short prompt, or both, replays the CUDA graph of the next size up. Others are launched kernel
by kernel, which takes the host as long as a GPU computes a few hundred tokens of an 8B model. Passes share one device
buffer for inputs: the stream orders a pass's copy after the pass before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, Protocol

import torch

from engine.arrays import Ints, Longs
from engine.batch.batch import ForwardBatch, batch_of
from engine.batch.layout import MAX_GRAPH_PROMPTS, GraphSize, Packed
from engine.kernels.attention import copies_in_bulk
from engine.sequence import Chunk, Sequence
from engine.step.between import Between
from engine.step.block_tables import BlockTables
from engine.step.chained import Chained, Queries
from engine.step.graphs import Graphs, logits_of, results_of
from engine.step.limits import HeadLimits, Limits
from engine.step.pack import graph_size, pack
from engine.step.singles import pack_singles
from engine.step.staging import NewestTokens, Staging
from engine.weights.parameters import Weights

log = logging.getLogger("baton.engine")

INPUT_WORDS = 1 << 16  # capacity for everything except block tables


class Decoder(Protocol):
    """A model on a device: one of ours, or one that `transformers` computes."""

    @property
    def weights(self) -> Weights: ...

    def forward(
        self, batch: ForwardBatch, parts: SequenceOf[Any], *, logits: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Compute the batch, write its KV into the pool's `parts`, return the sampled rows' logits [R, V]; None for R = 0.

        A stage before the last returns the rows [T, E] for the next one. The result is in `logits` if that is given.
        """
        ...

    def obstacle(self, rehearse: Callable[[], None]) -> str:
        """Return why no pass of this decoder can be captured; "": all can. `rehearse` launches a pass of each kind."""
        ...


class Runner:
    """Owns a device's input buffers and graphs. One thread at a time."""

    def __init__(
        self,
        decoder: Decoder,
        parts: SequenceOf[Any],
        limits: Limits,
        between: Between | None,
        *,
        max_tokens: int,
        max_sequences: int,
    ) -> None:
        """`parts`: views of the pool, see `engine.model.decoder`. `between`: of a stage."""
        self.graphs = Graphs(limits)
        self._between = between
        self._decoder = decoder
        self._parts = parts
        self.limits = limits
        self._device = device = decoder.weights.device
        self._tables = BlockTables(
            max_blocks=-(-limits.max_model_len // limits.block_size),
            num_blocks=limits.num_blocks,
            groups=limits.tables,
            num_rows=2 * max_sequences,
        )
        self._staging = Staging(device, torch.int32, capacity=INPUT_WORDS)
        # Graphs read their inputs from this buffer, so every pass of a graph must fit.
        room = INPUT_WORDS + (2 * max_sequences + MAX_GRAPH_PROMPTS) * self._tables.max_blocks
        room *= limits.tables.count
        self._inputs = torch.zeros(room, dtype=torch.int32, device=self._device)
        self._uploaded = self._inputs
        self._newest = torch.zeros(max(max_sequences, max_tokens), dtype=torch.int64, device=self._device)

    def ordered(self, chunks: SequenceOf[Chunk]) -> list[Chunk]:
        """The chunks in packing order; the order is stable."""
        return sorted(chunks, key=self.limits.place)

    def pack(self, chunks: SequenceOf[Chunk], newest: NewestTokens) -> Packed:
        """Lay out one pass over the chunks, decoding ones first; `newest`: the samples of the previous pass.

        Raises InvalidChunkError; nothing was launched then.
        """
        return pack(chunks, newest, self._tables, self.limits, graph=self.graphs.choose(chunks))

    @torch.inference_mode()
    def execute(self, packed: Packed) -> torch.Tensor | None:
        """Launch one pass. Returns the logits [R, V] of the sampled sequences, which the next pass may overwrite.

        Stages hand rows to one another: the last one has logits. Raises RankLostError.
        """
        inputs, size = self._upload(packed.words), packed.size
        rows = None if self._between is None else self._between.receive(size)
        if size.graph is not None:
            results: torch.Tensor | None = self.graphs.replay(size.graph)
        else:
            batch = batch_of(size, packed.layout, inputs, self._newest)
            results = self._decoder.forward(batch if rows is None else replace(batch, rows=rows), self._parts)
        return logits_of(results, size) if self._between is None else self._between.hand_on(results, size)

    def inputs_of(self, packed: Packed) -> ForwardBatch:
        """The inputs of the pass that was executed last; `newest` are its own samples once these are kept."""
        return batch_of(packed.size, packed.layout, self._uploaded, self._newest)

    def inputs_again(self, packed: Packed) -> ForwardBatch:
        """The inputs of a pass behind which others were executed, where its graph reads them; `newest` aren't its own."""
        self._upload(packed.words)
        return self.inputs_of(packed)

    def place_of(self, sequence: Sequence) -> tuple[int, int]:
        """The row of block tables of a sequence in the pass that was packed last, and the positions that its blocks cover."""
        row, blocks = self._tables.place_of(sequence)
        return row, min(blocks * self.limits.block_size, self.limits.max_model_len)

    def tables_of(self, rows: Longs, end: int) -> Ints:
        """The blocks [S, W] of sequences at these rows of block tables, as far as they cover `end` positions."""
        return self._tables.table[0, rows, : -(-end // self.limits.block_size)]

    def singles(
        self, tables: Ints, ends: Longs, heads: SequenceOf[HeadLimits], *, seen: Longs | None = None
    ) -> ForwardBatch:
        """Inputs for the position before each end, see `pack_singles`. They replace those of the pass before."""
        packed = pack_singles(tables, ends, self.limits, heads, seen=ends if seen is None else seen)
        return batch_of(packed.size, packed.layout, self._upload(packed.words), self._newest)

    def batches_of(self, chained: Chained) -> list[ForwardBatch] | None:
        """The inputs of a graph that replays these passes, all of them empty now; None: there is no room."""
        if chained.words > len(self._inputs):
            return None
        self._upload(chained.empty())
        return chained.batches(self._inputs, self._newest)

    def send(self, chained: Chained, passes: SequenceOf[Queries], tables: Ints) -> bool:
        """Copy the inputs of passes to where their graph reads them; `tables` [S, W]. False: there is no room."""
        width = -(-max(int(queries.seen.max()) for queries in passes) // self.limits.block_size)
        if chained.words + len(tables) * width > len(self._inputs):
            return False
        self._upload(chained.pack(passes, tables[:, :width]))
        return True

    def keep_newest(self, token_ids: torch.Tensor) -> None:
        """Let the next pass start from `token_ids` [R] int64."""
        self._newest[: len(token_ids)].copy_(token_ids)

    @torch.inference_mode()
    def rehearse(self, sizes: SequenceOf[GraphSize]) -> None:
        """Launch kernel by kernel what `capture` will capture."""
        for _, batch in self.empty_passes(sizes):
            self._decoder.forward(batch, self._parts)

    @torch.inference_mode()
    def capture(self, sizes: SequenceOf[GraphSize]) -> None:
        """Capture a pass of each size; those with prompts only if attention uses TMA, and not with MLA.

        None if the decoder knows an obstacle.
        """
        if why := self._decoder.obstacle(functools.partial(self.rehearse, sizes)):
            log.warning("engine.not_captured", extra={"why": why})
            return
        for size, batch in self.empty_passes(sizes):
            self.graphs.capture(size, functools.partial(self._forward_into, batch))

    def forget_graphs(self) -> None:
        """Drop what was captured, as before the decoder's memory goes."""
        self.graphs = Graphs(self.limits)

    def _forward_into(self, batch: ForwardBatch, logits: torch.Tensor | None) -> torch.Tensor | None:
        if logits is None:
            return self._decoder.forward(batch, self._parts)
        return self._decoder.forward(batch, self._parts, logits=logits)

    def an_empty_pass(self) -> ForwardBatch:
        """The inputs of the smallest captured pass, of a token."""
        packed = self._empty_pass(GraphSize(1))
        return batch_of(packed.size, packed.layout, self._upload(packed.words), self._newest)

    def empty_passes(self, sizes: SequenceOf[GraphSize]) -> Iterator[tuple[GraphSize, ForwardBatch]]:
        """The inputs of passes of these sizes, those with the largest results first; each replaces those of the one before."""
        wanted = self.capturable(sizes)
        between, most = self._between, max((size.tokens for size in wanted), default=0)
        if between is not None:
            between.reserve(most)
        for graph in sorted(wanted, key=results_of if between is None else between.results, reverse=True):
            packed = self._empty_pass(graph)
            batch = batch_of(packed.size, packed.layout, self._upload(packed.words), self._newest)
            yield graph, batch if between is None else between.captured(batch)

    def capturable(self, sizes: SequenceOf[GraphSize]) -> list[GraphSize]:
        """The sizes without those that are never captured: with prompts, unless attention uses TMA, and with MLA.

        MLA prefill needs block tables, and captured graphs have none for prompts.
        """
        in_bulk = all(
            shape.forms is None
            and copies_in_bulk(
                torch.empty((0, shape.heads.head_dim), dtype=self._decoder.weights.dtype, device=self._device)
            )
            for shape in self.limits.attention
        )
        return [size for size in sizes if not size.prompts or in_bulk]

    def _empty_pass(self, graph: GraphSize) -> Packed:
        return Packed.empty(graph_size(graph, self.limits))

    @torch.inference_mode()
    def measure(self) -> dict[GraphSize, float]:
        """Milliseconds of each captured decode pass, without contexts: the cost of more tokens in it."""
        times = {}
        for graph in self.graphs.sizes:
            if graph.decoding:
                self._upload(self._empty_pass(graph).words)
                times[graph] = self.graphs.measure(graph)
        return times

    def _upload(self, words: Ints) -> torch.Tensor:
        """Copy the inputs to the device; return their buffer."""
        count, inputs = len(words), self._inputs
        self._staging.write(count)[:] = words
        if count > len(inputs):
            inputs = torch.empty(count, dtype=torch.int32, device=self._device)
        self._staging.send(count, inputs)
        self._uploaded = inputs
        return inputs
