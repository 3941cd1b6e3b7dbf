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
from services.worker.settings import WorkerServiceSettings
from tests.pooling_models import FAMILIES, build_pooling_model


@pytest.mark.parametrize(
    ("settings", "sleeps"),
    [
        ({}, True),
        ({"transport": "ucx"}, False),
        ({"device": "cuda:1", "transport": "local"}, True),
        ({"device": "cuda:1", "transport": "local", "kv_host_mb": "64"}, False),
        ({"device": "cuda:1"}, False),
        ({"device": "cuda:1", "transport": "ucx"}, False),
    ],
)
@pytest.mark.parametrize("several", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_one_sleeps_whose_memory_nobody_knows_by_address(
    settings: dict[str, str], sleeps: bool, several: dict[str, int]
) -> None:
    assert can_sleep(WorkerServiceSettings(**settings, **several)) is sleeps  # type: ignore[arg-type]


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
