"""Sizes of a host's workers, and those that it may put to sleep, known from settings and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.pooling.families import read_encoder_spec
from engine.pooling.prefixes import can_share
from modelfiles.pooling import PREFIX_BYTES
from services.host.needs import bytes_of, can_sleep
from services.worker.options import WorkerOptions
from tests.pooling_models import FAMILIES, build_pooling_model


@pytest.mark.parametrize(
    ("settings", "ranks", "sleeps"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"transport": "ucx"}, 1, False),
        ({"device": "cuda:1", "transport": "local"}, 2, False),
        ({"device": "cuda:1", "transport": "local"}, 1, True),
        ({"device": "cuda:1", "transport": "local", "kv_host_mb": "64"}, 1, False),
        ({"device": "cuda:1"}, 1, False),
        ({"device": "cuda:1", "transport": "ucx"}, 1, False),
    ],
)
def test_one_sleeps_whose_memory_nobody_knows_by_address(settings: dict[str, str], ranks: int, sleeps: bool) -> None:
    assert can_sleep(WorkerOptions(**settings), processes=ranks) is sleeps  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("Gemma3TextModel", {"use_bidirectional_attention": False}),
        ("Qwen2Model", {"is_causal": False}),
    ],
)
def test_a_worker_of_vectors_needs_memory_for_prefixes_where_its_model_shares_them(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = build_pooling_model(tmp_path, family, **changes)
    plain, larger = (bytes_of(WorkerOptions(kv_memory_mb=mb), model) for mb in (0, 300))  # type: ignore[call-arg]
    if can_share(read_encoder_spec(model)):
        assert larger - plain == (300 << 20) - PREFIX_BYTES["cpu"]
        assert plain > PREFIX_BYTES["cpu"]
    else:
        assert larger == plain < 1 << 20
