"""The inputs of a forward pass: views of the words laid out by `pack`, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from engine.batch.layout import HeadsSize, Layout, MadeSize, PassSize, PromptsSize, SinglesSize, item_copies
from engine.kernels.attention import AttentionBatch, AttentionPlan, DecodeItems, HeadShape, MadePlan, PrefillPlan
from engine.kernels.delta import StateBatch
from engine.kernels.embedding import InputTokens
from engine.kernels.once import Once


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of `Decoder.forward`, on the device."""

    tokens: InputTokens
    positions: torch.Tensor  # [T] int32
    slots: torch.Tensor  # [T] int32: slot mapping; -1: not written
    attention: Mapping[HeadShape, AttentionPlan]
    has_prompts: bool
    states: tuple[StateBatch, ...]  # one for each block of a state
    # The last layer of a pass with prompts computes the sampled rows only. None: all rows, or none.
    final: AttentionPlan | None
    sampled_rows: torch.Tensor | None  # [R] int32: rows that need logits; None: all (decoding)
    num_sampled: int
    once: Once = field(default_factory=Once)
    windowed: tuple[ForwardBatch, ...] = ()  # the same pass in each block of a window's entry
    rows: torch.Tensor | None = None  # [T, E]: of the stage before; None in the first one

    def at(self, number: int | None) -> ForwardBatch:
        """The pass for a layer that keeps its content in this block of a window's entry; None: in blocks of tokens."""
        return self if number is None else self.windowed[number]


def batch_of(size: PassSize, layout: Layout, buffer: torch.Tensor, newest: torch.Tensor) -> ForwardBatch:
    """The views of a buffer with the words of a pass of this size."""
    views = _Views(layout, buffer, is_captured=size.graph is not None)
    final = None
    if size.prompts is not None and size.final.places:
        items = {size.last_window: views.items("final", 0)}
        final = AttentionPlan(size.final.places, views.singles("final", size.final), items, buffer, None)
    decodes_only = size.graph is not None and size.prompts is None
    batch = ForwardBatch(
        tokens=InputTokens(views["token_ids"], views["sources"], newest),
        positions=views["positions"],
        slots=views["slots"],
        attention=dict(views.attention(size, 0)),
        has_prompts=size.prompts is not None,
        states=views.states(size.states.blocks) if size.states is not None else (),
        final=final,
        sampled_rows=None if decodes_only else views["sampled_rows"],
        num_sampled=size.num_sampled,
    )
    windowed = [
        replace(batch, slots=layout.view(buffer, "slots", table), attention=dict(views.attention(size, table)))
        for table in range(1, 1 + size.more_tables)
    ]
    return replace(batch, windowed=tuple(windowed)) if windowed else batch


@dataclass(frozen=True, slots=True)
class _Views:
    layout: Layout
    buffer: torch.Tensor
    is_captured: bool  # attention is then described by items and tiles only

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.layout.view(self.buffer, name)

    def attention(self, size: PassSize, table: int) -> Iterator[tuple[HeadShape, AttentionPlan]]:
        """The plan for each shape of heads, with this copy of tables."""
        decoding = self.singles("decode", size.decode, table) if size.decode.places else None
        prompts = self.prompts(size.prompts, table) if size.prompts is not None else None
        copies = (
            item_copies([shape.windows for shape in size.attention], size.more_tables) if size.decode.places else []
        )
        for number, shape in enumerate(size.attention):
            items = {
                cut[1]: self.items("decode", copy, queries=shape.item_queries)
                for copy, cut in enumerate(copies)
                if (cut[0], cut[2]) == (number, table)
            }
            prefill, made = None, None
            if size.prompts is not None and prompts is not None:
                prefill = self.prefill(size.prompts, prompts, shape, number, table)
                if shape.made is not None:
                    prefill, made = _apart(prefill, shape.made)
            yield shape.heads, AttentionPlan(size.decode.places, decoding, items, self.buffer, prefill, made)

    def states(self, count: int) -> tuple[StateBatch, ...]:
        def each(number: int) -> StateBatch:
            moves, tiles = (self.layout.view(self.buffer, f"state_{name}", number) for name in ("moves", "tiles"))
            return StateBatch(moves, tiles, self["state_runs"])

        return tuple(map(each, range(count)))

    def singles(self, name: str, size: SinglesSize, table: int = 0) -> AttentionBatch | None:
        """Sequences with one query each, its last token."""
        if self.is_captured:
            return None
        ends = self[f"{name}_ends"]
        on_cpu = ends.device.type == "cpu"  # only plain torch reads `query_start`
        return AttentionBatch(
            query_start=torch.arange(size.places + 1, dtype=torch.int32) if on_cpu else ends,
            context_len=ends,
            block_table=self.layout.view(self.buffer, f"{name}_tables", table),
            max_query_len=1,
            max_context_len=size.longest,
        )

    def items(self, name: str, copy: int, *, queries: int = 1) -> DecodeItems:
        items, parts = (self.layout.view(self.buffer, f"{name}_{what}", copy) for what in ("items", "parts"))
        return DecodeItems(items, parts, queries)

    def prompts(self, size: PromptsSize, table: int) -> AttentionBatch:
        return AttentionBatch(
            query_start=self["query_start"],
            context_len=self["context_len"],
            block_table=self.layout.view(self.buffer, "prompt_tables", table),
            max_query_len=size.max_query_len,
            max_context_len=size.max_context_len,
        )

    def prefill(
        self, size: PromptsSize, batch: AttentionBatch, shape: HeadsSize, number: int, table: int
    ) -> PrefillPlan:
        blocks = self.layout.view(self.buffer, "context_blocks", table) if size.blocks else None
        tiles = self.layout.view(self.buffer, "tiles", number)
        return PrefillPlan(batch, tiles, shape.tile_rows, shape.tiles_at_once, blocks)


def _apart(plan: PrefillPlan, size: MadeSize) -> tuple[PrefillPlan | None, MadePlan]:
    """Prompts whose queries are absorbed, if any, and those after them that are up-projected."""
    batch, first = plan.batch, size.prompts
    assert plan.blocks is not None, "contexts are gathered"

    def some(starts: slice, prompts: slice) -> AttentionBatch:
        return replace(
            batch,
            query_start=batch.query_start[starts],
            context_len=batch.context_len[prompts],
            block_table=batch.block_table[prompts],
        )

    made = replace(
        plan,
        batch=some(slice(first, None), slice(first, None)),
        tiles=plan.tiles[size.tiles :],
        rows=size.tile_rows,
        blocks=plan.blocks[size.blocks :],
    )
    absorbed = replace(plan, batch=some(slice(first + 1), slice(first)), tiles=plan.tiles[: size.tiles])
    return absorbed if first else None, MadePlan(size.rows, made)
