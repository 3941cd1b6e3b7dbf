"""The inputs of one forward pass: views of the words that `pack` laid out, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.attention import AttentionBatch, AttentionPlan, DecodeItems, PrefillPlan
from engine.step.layout import Layout, PassSize, PromptsSize, SinglesSize


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of `Decoder.forward`, on the device."""

    token_ids: torch.Tensor  # [T] int32
    sources: torch.Tensor  # [T] int32: row of `newest` that holds the token; -1: `token_ids` does
    newest: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [T] int32
    slots: torch.Tensor  # [T] int32: each token's slot; -1: not written
    attention: AttentionPlan
    # The last layer of a pass with prompts computes the sampled rows alone. None: all rows, or none.
    final: AttentionPlan | None
    sampled_rows: torch.Tensor | None  # [R] int32: rows whose logits are wanted; None: all (decoding)
    num_sampled: int


def batch_of(size: PassSize, layout: Layout, buffer: torch.Tensor, newest: torch.Tensor) -> ForwardBatch:
    """The views of a buffer with the words of a pass of this size."""
    views = _Views(layout, buffer, is_captured=size.graph is not None)
    prompts, final = None, None
    if size.prompts is not None:
        prompts = views.prefill(size.prompts)
        if size.final.places:
            final = views.singles("final", size.final, (size.last_window,), None)
    decodes_only = size.graph is not None and size.prompts is None
    return ForwardBatch(
        token_ids=views["token_ids"],
        sources=views["sources"],
        newest=newest,
        positions=views["positions"],
        slots=views["slots"],
        attention=views.singles("decode", size.decode, size.windows, prompts),
        final=final,
        sampled_rows=None if decodes_only else views["sampled_rows"],
        num_sampled=size.num_sampled,
    )


@dataclass(frozen=True, slots=True)
class _Views:
    layout: Layout
    buffer: torch.Tensor
    is_captured: bool  # attention is then described by items and tiles alone

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.layout.view(self.buffer, name)

    def singles(
        self, name: str, size: SinglesSize, windows: tuple[int, ...], prefill: PrefillPlan | None
    ) -> AttentionPlan:
        """Sequences with one query each, its last token; and prompts, if there are any."""
        if not size.places:
            return AttentionPlan(0, None, {}, self.buffer, prefill)
        batch = None
        if not self.is_captured:
            ends = self[f"{name}_ends"]
            on_cpu = ends.device.type == "cpu"  # plain torch alone reads `query_start`
            batch = AttentionBatch(
                query_start=torch.arange(size.places + 1, dtype=torch.int32) if on_cpu else ends,
                context_len=ends,
                block_table=self[f"{name}_tables"],
                max_query_len=1,
                max_context_len=size.longest,
            )
        items = {
            window: DecodeItems(
                self.layout.view(self.buffer, f"{name}_items", copy),
                self.layout.view(self.buffer, f"{name}_parts", copy),
            )
            for copy, window in enumerate(windows)
        }
        return AttentionPlan(size.places, batch, items, self.buffer, prefill)

    def prefill(self, size: PromptsSize) -> PrefillPlan:
        batch = AttentionBatch(
            query_start=self["query_start"],
            context_len=self["context_len"],
            block_table=self["prompt_tables"],
            max_query_len=size.max_query_len,
            max_context_len=size.max_context_len,
        )
        blocks = self["context_blocks"] if size.blocks else None
        return PrefillPlan(batch, self["tiles"], size.tile_rows, size.tiles_at_once, blocks)
