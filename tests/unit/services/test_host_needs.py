"""Sizes of a host's workers, and those that it may put to sleep, known from settings and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.pooling.families import read_encoder_spec
from engine.pooling.prefixes import can_share
from modelfiles.pooling import PREFIX_BYTES
from services.host.needs import bytes_of, stays_awake
from services.worker.options import WorkerOptions
from services.worker.settings import WorkerServiceSettings
from tests.pooling_models import FAMILIES, build_pooling_model

KNOWN = "--transport {}: peers know a GPU's KV cache by its address: take --transport local"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, ""),
        ({"transport": "ucx"}, ""),
        ({"transport": "ucx", "device": "fake"}, ""),
        ({"kv_host_mb": "64"}, ""),
        ({"device": "cuda:1", "transport": "local"}, ""),
        ({"device": "cuda:1", "transport": "local", "kv_host_mb": "64"}, "--kv-host-mb 64: it knows a GPU's KV cache"),
        ({"device": "cuda", "transport": "local", "kv_host_mb": "auto"}, "--kv-host-mb auto: it knows a GPU's"),
        ({"device": "cuda:1"}, KNOWN.format("cuda_ipc")),
        ({"device": "cuda:1", "transport": "ucx"}, KNOWN.format("ucx")),
    ],
)
@pytest.mark.parametrize("several", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_one_sleeps_whose_memory_nobody_knows_by_address(
    settings: dict[str, str], why: str, several: dict[str, int]
) -> None:
    worker = WorkerServiceSettings(**settings, **several)  # type: ignore[arg-type]
    assert stays_awake(worker).startswith(why)
    assert bool(stays_awake(worker)) is bool(why)


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
