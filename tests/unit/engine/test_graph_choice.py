"""Which captured graph computes a pass. The sizes are given by hand: graphs themselves need a GPU."""

from __future__ import annotations

import pytest

from engine.batch.layout import GraphSize
from engine.kernels.attention import HeadShape, Tiling
from engine.sequence import Chunk
from engine.step.graphs import Graphs
from engine.step.limits import GroupTables, HeadLimits, LastAttention, Limits
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.tables import groups_with

HEADS = HeadLimits(HeadShape(16, 4, 64), (0,), items_at_once=66, item_queries=4, tiling=Tiling(64, 128))
LIMITS = Limits(
    block_size=16,
    num_blocks=100,
    vocab_size=100,
    max_model_len=5000,
    attention=(HEADS,),
    last=LastAttention(HEADS, window=0),
    tables=GroupTables(groups_with(16)),
    graph_context=2048,
)
SIZES = [GraphSize(2), GraphSize(0, 16), GraphSize(8), GraphSize(4, 60), GraphSize(0, 96), GraphSize(8, 120)]
STEP, SILENT_STEP = (40, 1, True), (40, 1, False)  # positions before a chunk, its tokens, whether it samples


def _choose(*parts: tuple[int, int, bool], sizes: list[GraphSize] = SIZES) -> GraphSize | None:
    graphs = Graphs(LIMITS)
    graphs.sizes = sizes
    return graphs.choose([Chunk(new_sequence("a", []), start, count, sample) for start, count, sample in parts])


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([STEP], GraphSize(2)),
        ([STEP] * 3, GraphSize(8)),
        ([(0, 16, True)], GraphSize(0, 16)),
        ([(0, 17, True)], GraphSize(4, 60)),
        ([STEP, (0, 9, True)], GraphSize(4, 60)),
        ([STEP, (500, 9, False)], GraphSize(4, 60)),
        ([(500, 9, True)], GraphSize(4, 60)),
        ([(0, 9, True), (0, 9, True)], GraphSize(4, 60)),
        ([STEP] * 5 + [(0, 9, True)] * 4, GraphSize(8, 120)),
    ],
)
def test_the_first_graph_with_room_for_everything_is_taken(parts: list[tuple[int, int, bool]], size: GraphSize) -> None:
    assert _choose(*parts) == size


@pytest.mark.parametrize(
    "parts",
    [
        [STEP] * 9,
        [(0, 121, True)],
        [STEP, (0, 121, True)],
        [(0, 9, True)] * 5,  # more prompts than a graph lists
        [STEP, (2040, 9, True)],  # more blocks before them than it lists
        [STEP, SILENT_STEP],
    ],
)
def test_a_pass_that_fits_into_no_graph_is_launched_kernel_by_kernel(parts: list[tuple[int, int, bool]]) -> None:
    assert _choose(*parts) is None


def test_a_graph_of_one_whole_prompt_takes_no_chunk_behind_others_and_no_second_prompt() -> None:
    alone = [GraphSize(0, 96)]
    assert _choose((0, 20, True), sizes=alone) == alone[0]
    assert _choose((16, 20, True), sizes=alone) is None
    assert _choose((0, 20, True), (0, 20, True), sizes=alone) is None


def test_without_graphs_there_is_nothing_to_choose() -> None:
    assert _choose(STEP, sizes=[]) is None
