"""The shares of ranks fill a receiver's blocks once, with the bytes that it would have computed itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from common.pages import KVLayout
from kvtransfer.digest import block_digests
from kvtransfer.host import added
from kvtransfer.plan import LayoutMismatchError, blocks_per_entry
from kvtransfer.shares import ZEROS, Share, shares
from tests.unit.kvtransfer.widths import KEYS, MODELS, STATE, Bytes, Model, ranks_of, stages_of

WIDTHS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]
WITHOUT_STATES = [name for name, parts in MODELS.items() if all(each.per_token for each in parts)]


def fill(share: Share, group: int, source: Bytes, target: Bytes, written: Bytes) -> None:
    """Copy a share run by run into an entry."""
    for piece in share.groups[group] if share else ():
        for run in piece.runs:
            for row in range(run.count):
                end = run.destination + row * run.destination_step
                into = (piece.destination, slice(end, end + run.num_bytes))
                begin = run.source + row * run.source_step
                assert end + run.num_bytes <= target.shape[1]
                target[into] = 0 if run.source == ZEROS else source[piece.source, begin : begin + run.num_bytes]
                written[into] += 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("before", "after"), WIDTHS)
def test_shares_fill_each_byte_of_a_receiver_once(name: str, before: int, after: int) -> None:
    parts = MODELS[name]
    check_filled(Model(parts), ranks_of(parts, before), ranks_of(parts, after))


@pytest.mark.parametrize("name", WITHOUT_STATES)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2), (3, 2), (1, 3)])
def test_shares_of_stages_fill_each_byte_of_a_receiver_once(name: str, before: int, after: int) -> None:
    """Also a stage that keeps nothing of a part, and workers of which one has stages and the other ranks."""
    parts = MODELS[name]
    fewest = min if any(part.window for part in parts) else max  # beside windows each stage keeps tokens
    if fewest(part.layers for part in parts) < max(before, after):
        parts = [msgspec.structs.replace(part, layers=2 * part.layers) for part in parts]
    check_filled(Model(parts), stages_of(parts, before), stages_of(parts, after))
    check_filled(Model(parts), ranks_of(parts, 2), stages_of(parts, after))
    check_filled(Model(parts), stages_of(parts, before), ranks_of(parts, 2))


def check_filled(model: Model, sources: Sequence[KVLayout], destinations: Sequence[KVLayout]) -> None:
    """Each byte of every receiving rank is written once, with what it would have computed."""
    for rank, destination in enumerate(destinations):
        cut = shares(sources, destination, rank=rank, ranks=len(destinations))
        for group, num_blocks in enumerate(blocks_per_entry(destination)):
            target = np.full((num_blocks, destination.block_bytes), 0xAA, np.uint8)
            written = np.zeros_like(target)
            for source, share in zip(sources, cut, strict=True):
                fill(share, group, model.entry(source, group), target, written)

            assert (written == 1).all()
            assert (target == model.entry(destination, group)).all()


@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_digests_of_stages_add_up_and_tell_them_apart(name: str) -> None:
    model, (whole,) = Model(MODELS[name]), stages_of(MODELS[name], 1)

    def digest_of(block: Bytes, layout: KVLayout) -> bytes:
        return block_digests(torch.from_numpy(block.copy()), [0], layout)

    stages = stages_of(MODELS[name], 2)
    blocks = [model.entry(stage, 0) for stage in stages]
    assert added([digest_of(*each) for each in zip(blocks, stages, strict=True)]) == digest_of(
        model.entry(whole, 0), whole
    )
    if stages[0].block_bytes == stages[1].block_bytes:
        swapped = zip(blocks[::-1], stages, strict=True)
        assert added([digest_of(*each) for each in swapped]) != digest_of(model.entry(whole, 0), whole)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_between_equal_widths_each_rank_sends_whole_blocks_to_its_like(name: str, ranks: int) -> None:
    layouts = ranks_of(MODELS[name], ranks)
    for rank, layout in enumerate(layouts):
        assert [share.is_whole for share in shares(layouts, layout, rank=rank, ranks=ranks)] == [
            one == rank for one in range(ranks)
        ]


def test_latents_go_to_each_rank_from_one_and_their_senders_take_turns() -> None:
    four, two = (ranks_of(MODELS["latents"], width) for width in (4, 2))

    def senders(sources: list, targets: list) -> list[list[int]]:  # type: ignore[type-arg]
        cuts = [shares(sources, one, rank=at, ranks=len(targets)) for at, one in enumerate(targets)]
        return [[rank for rank, share in enumerate(cut) if share] for cut in cuts]

    assert senders(four, two) == [[0], [2]]
    assert senders(two, four) == [[0], [0], [1], [1]]
    assert senders(four, two[:1]) == [[0]]


def test_heads_of_a_block_are_runs_with_constant_steps() -> None:
    [whole] = ranks_of([KEYS], 1)
    share, _ = shares(ranks_of([KEYS], 2), whole, rank=0, ranks=1)
    [[piece]] = share.groups
    [run] = piece.runs
    assert (run.count, run.num_bytes, run.source_step, run.destination_step) == (16, 64, 64, 128)


def test_other_models_and_heads_that_nobody_keeps_are_refused() -> None:
    [whole], halves = ranks_of([KEYS], 1), ranks_of([KEYS], 2)
    with pytest.raises(LayoutMismatchError, match="no rank keeps head 2"):
        shares(halves[:1], whole, rank=0, ranks=1)
    with pytest.raises(LayoutMismatchError, match="no rank keeps layer 1"):
        shares(stages_of([KEYS], 2)[:1], whole, rank=0, ranks=1)
    with pytest.raises(LayoutMismatchError, match="KV groups are"):
        shares(halves, ranks_of([KEYS, STATE], 1)[0], rank=0, ranks=1)
    odd = msgspec.structs.replace(KEYS, dim=1)
    with pytest.raises(LayoutMismatchError, match="no multiple of 4"):
        shares(ranks_of([odd], 4), ranks_of([odd], 1)[0], rank=0, ranks=1)
