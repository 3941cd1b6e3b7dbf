"""Layouts on the wire: what today's peers read of them, and which blocks are equal."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import KVLayout as KVLayoutOfMessages
from common.pages import KVGroup, KVLayout, PagePart
from common.words import Keeps

PLAIN = KVLayout(num_blocks=7, num_layers=2, block_size=16, num_kv_heads=4, head_dim=8, dtype="bfloat16")
KEYS = PagePart(layers=2, planes=2, heads=4, dim=8, dtype="bfloat16")
STATE = PagePart(layers=1, planes=1, heads=4, dim=8, dtype="float32", per_token=False)


class LayoutOf010(msgspec.Struct, frozen=True, kw_only=True):
    """The layout as release 0.1.0 knows it."""

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str


def test_keys_and_values_alone_are_written_as_ever() -> None:
    layout = KVLayout.of([KEYS], num_blocks=7, block_size=16)

    assert layout == PLAIN
    assert layout.parts == ()
    assert layout.block_bytes == 2 * 2 * 16 * 4 * 8 * 2


def test_an_older_peer_reads_what_it_knows_of_a_layout_with_parts() -> None:
    layout = KVLayout.of([KEYS, STATE], num_blocks=7, block_size=16)

    older = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=LayoutOf010)

    assert msgspec.structs.asdict(older) == {
        name: getattr(PLAIN, name) for name in LayoutOf010.__struct_fields__
    }  # and so the same but for the parts


def test_an_older_peers_layout_has_keys_and_values_of_all_heads() -> None:
    older = LayoutOf010(num_blocks=7, num_layers=2, block_size=16, num_kv_heads=4, head_dim=8, dtype="bfloat16")

    layout = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=KVLayout)

    assert layout.pages == (msgspec.structs.replace(KEYS, all_heads=4, all_dim=8, all_layers=2),)
    assert layout.compatible_with(PLAIN)


@pytest.mark.parametrize("parts", [[KEYS], [KEYS, STATE], [STATE]])
def test_a_layout_comes_back_from_the_wire_as_it_was(parts: list[PagePart]) -> None:
    layout = KVLayout.of(parts, num_blocks=7, block_size=16)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayoutOfMessages) == layout


def test_parts_that_say_what_an_older_layout_says_are_compatible_with_it() -> None:
    explicit = msgspec.structs.replace(PLAIN, num_blocks=99, parts=(KEYS,))

    assert explicit.compatible_with(PLAIN)
    assert PLAIN.compatible_with(explicit)


def test_other_heads_of_the_same_model_are_not_compatible() -> None:
    halves = [
        KVLayout.of(
            [msgspec.structs.replace(KEYS, heads=2, first_head=first, all_heads=4)], num_blocks=7, block_size=16
        )
        for first in (0, 2)
    ]

    assert not halves[0].compatible_with(halves[1])
    assert not halves[0].compatible_with(PLAIN)
    assert halves[0].compatible_with(halves[0])


def rank_of(part: PagePart, rank: int, ranks: int) -> PagePart:
    if ranks == 1:
        return part
    heads = max(1, part.heads // ranks)
    return msgspec.structs.replace(part, heads=heads, first_head=rank * part.heads // ranks, all_heads=part.heads)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_of_any_width_keep_the_same_of_a_model_and_another_model_does_not(ranks: int) -> None:
    group = KVGroup(keeps=Keeps.STATE, parts=(STATE,), blocks_per_entry=4)
    whole = msgspec.structs.replace(PLAIN, parts=(KEYS,), groups=(group,))
    blocks = 4 if ranks == 1 else 2
    own = msgspec.structs.replace(group, parts=(rank_of(STATE, ranks - 1, ranks),), blocks_per_entry=blocks)
    rank = msgspec.structs.replace(whole, parts=(rank_of(KEYS, ranks - 1, ranks),), groups=(own,))

    assert whole.same_model(rank)
    assert rank.same_model(whole)
    assert rank.is_cut == (ranks > 1)
    assert rank.whole_pages == whole.whole_pages
    assert not rank.same_model(PLAIN)
    assert not rank.same_model(msgspec.structs.replace(whole, block_size=32))
    assert not rank.same_model(msgspec.structs.replace(whole, parts=(msgspec.structs.replace(KEYS, dim=16),)))


def test_runs_of_a_convolutions_channels_are_a_share_of_its_one_head() -> None:
    whole = PagePart(layers=1, planes=3, heads=1, dim=24, dtype="bfloat16", per_token=False)
    rank = msgspec.structs.replace(whole, dim=12, all_dim=24, channels=((4, 4), (16, 8)))

    assert (rank.whole, rank.is_cut) == (whole.whole, True)
    assert (rank.kept, whole.kept) == (((8, 8), (32, 16)), ((0, 48),))


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float4' of a KV pool"):
        _ = msgspec.structs.replace(PLAIN, dtype="float4").block_bytes
