"""A pass laid out for a larger graph gives the same logits and KV as laid out tightly, and as in plain torch.

In Triton's interpreter (`interpreter`), for a checkpoint; the graphs themselves need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.batch.batch import batch_of
from engine.batch.layout import FIELDS, GraphSize, Packed
from engine.cache.pages import entry_views, part_views
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.groups import Group, Table, extend
from engine.kernels import device
from engine.kernels.attention import KeptWindow, copies_in_bulk
from engine.kernels.delta.plan import KeptState
from engine.sequence import Chunk
from engine.step.block_tables import BlockTables
from engine.step.limits import Limits
from engine.step.pack import graph_size, pack
from engine.step.staging import NewestTokens
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.tables import blocks_of_tokens
from worker.serving.allocation import blocks_of

BLOCKS = 40
MOST_OTHER_CODES = 0.01  # of int4's, whose steps are wide: a number between two codes may become the other one
MAX_RELATIVE_ERROR = 0.05  # rounding to float16 makes 0.01, a forgotten switch 1
# tokens before the chunk and of the chunk, by sequence, those that decode first; the graph's size
PASSES: tuple[tuple[tuple[tuple[int, int], ...], GraphSize], ...] = (
    (((0, 5),), GraphSize(0, 16)),
    (((0, 70),), GraphSize(0, 96)),
    (((40, 1), (0, 9), (16, 30), (35, 3)), GraphSize(4, 64)),
    (((61, 20),), GraphSize(2, 64)),
    (((9, 1), (30, 1), (1, 1)), GraphSize(4)),
)


def interpret(folder: str) -> None:
    """For `interpreter`: all passes with a checkpoint; behind a bar, what keys and values are kept as."""
    model, _, kind = folder.partition("|")
    asked = EngineConfig(
        model=Path(model), dtype="float16", cache=CacheConfig(num_blocks=BLOCKS, kv_cache_dtype=kind or "auto")
    )
    loaded = Engine(asked)
    over_latents = any(heads.forms is not None for heads in loaded._runner.limits.attention)
    assert all(copies_in_bulk(part) for part in part_views(loaded.kv, loaded.layout) if part.dtype == torch.float16), (
        "this would check the twin"
    )
    limits = replace(loaded._runner.limits, graph_context=256)  # the interpreter takes its time for unused room
    for shares, room in PASSES:
        # Over latents no graph has prompts.
        _check_pass(loaded, limits, shares, None if over_latents and room.prompts else room)


def _check_pass(loaded: Engine, limits: Limits, shares: tuple[tuple[int, int], ...], room: GraphSize | None) -> None:
    tables = BlockTables(
        max_blocks=BLOCKS,
        num_blocks=BLOCKS,
        groups=limits.tables,
    )
    nobody, newest = NewestTokens.none(torch.device("cpu")), torch.zeros(8, dtype=torch.int64)
    places = torch.randperm(BLOCKS).tolist()
    chunks = []
    for start, count in shares:
        sequence = new_sequence("a", [(7 * index + start) % 100 for index in range(start + count)])
        sequence.tables = [_table(group, start, start + count, places) for group in limits.tables.groups]
        chunks.append(Chunk(sequence, start, count, count != 3))  # one prompt goes on in the next pass
    for part in part_views(loaded.kv, loaded.layout):
        if part.dtype == torch.uint8:
            part.random_(0, 256)  # int8, int4
        else:
            scale = 0.01 if loaded.config.cache.kv_cache_dtype in ("int8", "int4") else 1.0  # their scales
            part.copy_(scale * torch.randn(part.shape).abs() if scale < 1 else torch.randn(part.shape))
    for kept, blocks in _kept(loaded, chunks, KeptState):
        kept[blocks] = torch.randn(kept[blocks].shape).to(kept.dtype)
    own = {block for chunk in chunks for block in blocks_of(chunk.sequence)}
    rest = sorted(set(range(BLOCKS)) - own)
    lanes = loaded.kv.flatten(1).view(torch.uint8)
    lanes[rest] = 255  # NaN
    before = loaded.kv.clone()
    results = []
    for size, interpreted in ((None, True), (room, True), (None, False)):
        loaded.kv.copy_(before)
        packed = pack(chunks, nobody, tables, limits, graph=size)
        captured = packed if size is None else Packed.empty(graph_size(size, limits))
        places = captured.layout.places
        tables_apart = ("decode_tables", "final_tables")
        assert all(places[f.name] == packed.layout.places[f.name] for f in FIELDS if f.name not in tables_apart)
        buffer = torch.from_numpy(packed.words)
        batch = batch_of(captured.size, captured.layout, buffer, newest)
        with torch.inference_mode(), mock.patch.object(device, "_INTERPRET", interpreted), _nothing_but_nan():
            logits = loaded._decoder.forward(batch, _parts(loaded))
        assert logits is not None
        results.append((logits[: sum(chunk.sample for chunk in chunks)], _contents(loaded, chunks)))
    (logits, parts), (padded_logits, padded_parts), (plain_logits, _) = results
    assert logits.isfinite().all()
    torch.testing.assert_close(padded_logits, logits, rtol=1e-2, atol=1e-2)
    for part, padded in zip(parts, padded_parts, strict=True):
        if part.dtype == torch.uint8 and loaded.config.cache.kv_cache_dtype == "int4":
            steps = torch.stack((padded & 15, padded >> 4)).int() - torch.stack((part & 15, part >> 4)).int()
            assert steps.abs().max() <= 1
            assert (steps != 0).float().mean() < MOST_OTHER_CODES
        else:
            torch.testing.assert_close(padded.float(), part.float(), rtol=1e-2, atol=1e-2)
    error = (plain_logits.float() - logits.float()).norm(dim=1) / plain_logits.float().norm(dim=1)
    assert float(error.max()) < MAX_RELATIVE_ERROR, f"plain torch computes other logits: {error.tolist()}"
    assert bool((lanes[rest] == 255).all())
    assert not torch.equal(lanes, before.flatten(1).view(torch.uint8))


@contextmanager
def _nothing_but_nan() -> Iterator[None]:
    """Within, new memory holds NaN: what nobody wrote must not matter."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _table(group: Group, start: int, end: int, places: list[int]) -> Table:
    """The table of a chunk: its entries, or one where the group goes on in place."""
    num_entries = -(-end // group.block_size)
    first = group.first_seen(start) if group.grows else 0
    count = num_entries - first if group.grows else 1
    table = Table([()] * first, num_gone=first)
    extend(group, table, [tuple(places.pop() for _ in range(group.blocks)) for _ in range(count)], num_entries)
    return table


def _parts(loaded: Engine) -> list[Any]:
    layout = loaded.layout
    return [*part_views(loaded.kv, layout), *entry_views(loaded.kv, layout)]


def _kept(loaded: Engine, chunks: list[Chunk], kind: type) -> list[tuple[torch.Tensor, list[int]]]:
    """For each layer with entries of this kind: the view, and the blocks that have one."""
    found, views = [], iter(entry_views(loaded.kv, loaded.layout))
    for number, group in enumerate(loaded.layout.groups, start=1):
        own = [entry for chunk in chunks for _, entry in chunk.sequence.tables[number].own()]
        for _, layers in zip(group.parts, views, strict=False):
            found += [(kept.kept, [entry[kept.number] for entry in own]) for kept in layers if isinstance(kept, kind)]
    return found


def _contents(loaded: Engine, chunks: list[Chunk]) -> list[torch.Tensor]:
    """Contents of the blocks of tokens, then of the entries of windows and states."""
    blocks = sorted({block for chunk in chunks for block in blocks_of_tokens(chunk.sequence)})
    tokens = [part[blocks] for part in part_views(loaded.kv, loaded.layout)]
    return [
        *tokens,
        *(kept[its].clone() for kind in (KeptWindow, KeptState) for kept, its in _kept(loaded, chunks, kind)),
    ]
