"""What a position takes, from which floors are made, counts layers with a window wherever their blocks are."""

from __future__ import annotations

from benchmarks.engine import position_bytes
from common.pages import KVLayout, PagePart
from engine.cache.pages import with_windowed


def test_layers_in_columns_count() -> None:
    part = PagePart(layers=8, planes=2, heads=8, dim=256, dtype="bfloat16")
    plain = KVLayout.of([part], num_blocks=100, block_size=16)
    windowed = PagePart(layers=40, planes=2, heads=8, dim=256, dtype="bfloat16", window=1024)
    layout = with_windowed(plain, [windowed])
    assert position_bytes(plain) == 8 * 8192
    assert position_bytes(layout) == 48 * 8192
