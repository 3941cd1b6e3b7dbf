"""A plan of copies does to blocks what moving heads one by one does, and refuses by name what it can't."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages import KVLayout, PagePart
from kvtransfer.digest import factors_of, lane_digest
from kvtransfer.plan import Lanes, LayoutMismatchError, Plan, Runs, lane_indices, plan_copies
from tests.examples import examples

Block = npt.NDArray[np.uint8]

KEYS = PagePart(layers=2, planes=2, heads=4, dim=8, dtype="bfloat16")
LATENT = PagePart(layers=3, planes=1, heads=1, dim=24, dtype="bfloat16")
STATE = PagePart(layers=2, planes=1, heads=4, dim=16, dtype="float32", per_token=False)


def layout(*parts: PagePart, block_size: int = 4) -> KVLayout:
    return KVLayout.of(parts, num_blocks=10, block_size=block_size)


def shards(whole: KVLayout, ranks: int) -> list[KVLayout]:
    """What each of `ranks` workers keeps: its share of the heads, or all of a part with fewer heads than workers."""
    return [
        msgspec.structs.replace(whole, parts=tuple(share(part, rank, ranks) for part in whole.pages))
        for rank in range(ranks)
    ]


def share(part: PagePart, rank: int, ranks: int) -> PagePart:
    if part.heads % ranks:
        return part
    heads = part.heads // ranks
    return msgspec.structs.replace(part, heads=heads, first_head=rank * heads, all_heads=part.heads)


def part_of(block: Block, of: KVLayout, index: int) -> Block:
    """View a part of a block's bytes as [rows, heads, bytes of a head]."""
    part = of.pages[index]
    start = sum(before.block_bytes(of.block_size) for before in of.pages[:index])
    own = block[start : start + part.block_bytes(of.block_size)]
    return own.reshape(part.rows(of.block_size), part.heads, part.head_bytes)


def cut(block: Block, whole: KVLayout, to: KVLayout) -> Block:
    """The oracle: the bytes of `to`'s heads, taken head by head from a block of the whole model."""
    pieces = []
    for index, part in enumerate(to.pages):
        heads = [part_of(block, whole, index)[:, part.first_head + head] for head in range(part.heads)]
        pieces.append(np.stack(heads, axis=1).reshape(-1))
    return np.concatenate(pieces)


def bytes_in_common(source: KVLayout, destination: KVLayout) -> int:
    """Of a block, those of heads that both keep."""
    return sum(
        len(heads_of(ours) & heads_of(theirs)) * ours.rows(source.block_size) * ours.head_bytes
        for ours, theirs in zip(source.pages, destination.pages, strict=True)
    )


def heads_of(part: PagePart) -> set[int]:
    return set(range(part.first_head, part.first_head + part.heads))


def apply(plan: Plan, source: Block, destination: Block, written: npt.NDArray[np.int64]) -> None:
    """Copy run by run, as a transport would, and count how often each byte is written."""
    for run in plan.runs:
        for index in range(run.count):
            read, write = run.source + index * run.source_step, run.destination + index * run.destination_step
            assert 0 <= read <= read + run.num_bytes <= len(source)
            assert 0 <= write <= write + run.num_bytes <= len(destination)
            destination[write : write + run.num_bytes] = source[read : read + run.num_bytes]
            written[write : write + run.num_bytes] += 1


@st.composite
def parts(draw: st.DrawFn) -> PagePart:
    return PagePart(
        layers=draw(st.integers(1, 3)),
        planes=draw(st.integers(1, 2)),
        heads=draw(st.sampled_from([1, 2, 4, 8])),
        dim=4 * draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"])),
        per_token=draw(st.booleans()),
    )


layouts = st.builds(
    lambda chosen, size: layout(*chosen, block_size=size), st.lists(parts(), min_size=1, max_size=3), st.integers(1, 5)
)


@examples(80)
@given(whole=layouts, before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**16))
def test_a_source_fills_the_heads_that_both_keep_once_and_as_heads_moved_one_by_one(
    whole: KVLayout, before: int, after: int, seed: int
) -> None:
    block = np.random.default_rng(seed).integers(0, 256, whole.block_bytes, dtype=np.uint8)
    sources = shards(whole, before)

    for destination in shards(whole, after):
        reached = np.zeros(destination.block_bytes, bool)
        for source in sources:
            if not (shared := bytes_in_common(source, destination)):
                continue
            filled = np.zeros(destination.block_bytes, np.uint8)
            written = np.zeros(destination.block_bytes, np.int64)
            apply(plan_copies(source, destination), cut(block, whole, source), filled, written)

            assert (written.max(), written.sum()) == (1, shared)
            assert (filled == cut(block, whole, destination) * (written == 1)).all()
            reached |= written == 1
        assert reached.all()


@examples(40)
@given(whole=layouts, before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**16))
def test_what_a_source_writes_has_one_digest_at_both_ends(whole: KVLayout, before: int, after: int, seed: int) -> None:
    block = np.random.default_rng(seed).integers(0, 256, whole.block_bytes, dtype=np.uint8)

    for source, destination in itertools.product(shards(whole, before), shards(whole, after)):
        if bytes_in_common(source, destination):
            ours, theirs = plan_copies(source, destination).lanes()
            assert digest_of(block, whole, source, ours) == digest_of(block, whole, destination, theirs)


def digest_of(block: Block, whole: KVLayout, kept: KVLayout, lanes: Lanes) -> int:
    return int(lane_digest(cut(block, whole, kept).view(np.uint32)[lanes], factors_of(kept)[lanes]))


@examples(40)
@given(whole=layouts, ranks=st.sampled_from([1, 2, 4]))
def test_lane_indices_of_shards_are_those_of_the_whole_models_block(whole: KVLayout, ranks: int) -> None:
    numbered = np.arange(whole.block_bytes // 4, dtype=np.uint32)

    for shard in shards(whole, ranks):
        assert (lane_indices(shard) == cut(numbered.view(np.uint8), whole, shard).view(np.uint32)).all()


@examples(40)
@given(whole=layouts, ranks=st.sampled_from([1, 2, 4]), num_blocks=st.integers(1, 99))
def test_between_equal_layouts_a_block_is_one_run(whole: KVLayout, ranks: int, num_blocks: int) -> None:
    for shard in shards(whole, ranks):
        plan = plan_copies(shard, msgspec.structs.replace(shard, num_blocks=num_blocks))

        assert plan.runs == (Runs(source=0, destination=0, num_bytes=shard.block_bytes),)
        assert plan.is_whole


def test_a_copy_names_its_heads_at_both_ends_and_its_runs() -> None:
    first, second = shards(layout(KEYS), 2)
    destination = layout(KEYS)

    (copy,) = plan_copies(second, destination).copies

    assert (copy.part, copy.source_head, copy.destination_head, copy.num_heads) == (0, 0, 2, 2)
    assert copy.runs == Runs(source=0, destination=32, num_bytes=32, count=16, source_step=32, destination_step=64)
    assert plan_copies(first, destination).copies[0].destination_head == 0
    assert not plan_copies(first, destination).is_whole


def refusal(source: KVLayout, destination: KVLayout) -> str:
    with pytest.raises(LayoutMismatchError) as refused:
        plan_copies(source, destination)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "dtype is bfloat16 here, float16 at the peer"),
        ({"layers": 3}, "layers is 2 here, 3 at the peer"),
        ({"planes": 1}, "planes is 2 here, 1 at the peer"),
        ({"dim": 16}, "dim is 8 here, 16 at the peer"),
        ({"heads": 8}, "all_heads is 4 here, 8 at the peer"),
        ({"per_token": False}, "per_token is True here, False at the peer"),
    ],
)
def test_another_kind_of_page_is_refused_by_name(change: dict[str, object], reason: str) -> None:
    other = msgspec.structs.replace(KEYS, **change)

    assert refusal(layout(KEYS), layout(other)) == f"the peer's KV layout differs: {reason}"


def test_every_difference_is_named_with_its_part() -> None:
    theirs = layout(KEYS, msgspec.structs.replace(STATE, dim=8, layers=1), block_size=8)

    reason = refusal(layout(KEYS, STATE), theirs)

    assert "block_size is 4 here, 8 at the peer" in reason
    assert "layers of part 1 is 2 here, 1 at the peer" in reason
    assert "dim of part 1 is 16 here, 8 at the peer" in reason
    assert "2 parts here, 1 at the peer" in refusal(layout(KEYS, STATE), layout(KEYS))


def test_heads_that_nobody_keeps_are_refused() -> None:
    first, second = shards(layout(KEYS), 2)

    assert refusal(first, second) == "no head in common: heads 0-1 here, heads 2-3 at the peer"


@pytest.mark.parametrize(
    "change", [{"first_head": 3, "all_heads": 4}, {"first_head": -1, "all_heads": 8}, {"heads": -4, "all_heads": 4}]
)
def test_heads_that_a_model_can_not_have_are_refused(change: dict[str, object]) -> None:
    whole = msgspec.structs.replace(KEYS, heads=change.get("all_heads", 4))
    wrong = msgspec.structs.replace(layout(KEYS), parts=(msgspec.structs.replace(KEYS, **change),))

    assert "heads are" in refusal(layout(whole), wrong)


def test_heads_of_half_a_lane_are_refused_only_if_they_are_sharded() -> None:
    odd = layout(msgspec.structs.replace(KEYS, dim=1))

    assert plan_copies(odd, odd).is_whole
    assert "a head of 2 bytes is no multiple of 4" in refusal(shards(odd, 2)[0], odd)


def sizes(of: Sequence[PagePart], block_size: int) -> list[int]:
    return [part.block_bytes(block_size) for part in of]


def test_state_latents_and_scales_are_parts_with_sizes_of_their_own() -> None:
    scales = PagePart(layers=2, planes=2, heads=4, dim=1, dtype="float32")
    small = PagePart(layers=2, planes=2, heads=4, dim=8, dtype="float8_e4m3fn")

    assert sizes([KEYS, LATENT, STATE, scales, small], 16) == [4096, 2304, 512, 1024, 2048]
    assert layout(KEYS, STATE, block_size=32).block_bytes == 8192 + 512  # a state doesn't grow with the block
