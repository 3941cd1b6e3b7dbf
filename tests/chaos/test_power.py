"""What the broker acknowledged survives a power cut when it syncs always, and does not by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.power import can_mount, cut


@pytest.mark.skipif(not can_mount(), reason="emulating a power cut needs root and loop devices")
async def test_what_was_acknowledged_survives_only_if_it_is_synced(tmp_path: Path) -> None:
    acked, lost = await cut(tmp_path / "always", always=True, publish_s=0.5)
    assert acked > 0
    assert lost == 0
    acked, lost = await cut(tmp_path / "default", always=False, publish_s=0.5)
    assert lost > 0, "the negative control kept everything: the cut is none"
