"""Layouts on the wire: what today's peers read of them, and which blocks are equal."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import KVLayout as KVLayoutOfMessages
from common.pages import KVLayout, PagePart

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

    assert layout.pages == (msgspec.structs.replace(KEYS, all_heads=4),)
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


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float4' of a KV pool"):
        _ = msgspec.structs.replace(PLAIN, dtype="float4").block_bytes
