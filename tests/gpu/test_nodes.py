"""Workers whose stages are on several nodes, each with a GPU, or all with one: rows cross pinned memory and a bridge.

python -m pytest -q tests/gpu/test_nodes.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.wide import check
from tests.models import build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = {"device": "cuda:0", "transport": "ucx", "dtype": "float32"}  # every node's first GPU


@pytest.mark.parametrize(
    ("are_stages", "prefill", "decode", "nodes"),
    [
        ((True, False), 2, 1, {"prefill-0": 2}),
        ((False, True), 1, 2, {"decode-0": 2}),
        ((True, True), 3, 2, {"prefill-0": 3, "decode-0": 2}),
    ],
    ids=["prefill", "decode", "three nodes"],
)
async def test_stages_on_nodes_hand_over(
    are_stages: tuple[bool, bool], prefill: int, decode: int, nodes: dict[str, int], tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=5)
    await check(tmp_path, prefill=prefill, decode=decode, model=model, are_stages=are_stages, nodes=nodes, **GPU)
