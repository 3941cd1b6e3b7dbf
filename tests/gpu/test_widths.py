"""Workers of one and of two GPUs hand over to each other by cuIpc or UCX, and answer as one process on a CPU does.

python -m pytest -q tests/gpu/test_widths.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.wide import check
from tests.unit.engine.families.catalogue import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

GPU = {"device": "cuda:0", "transport": "cuda_ipc", "dtype": "float32"}  # the first of a worker's GPUs


@pytest.mark.parametrize("transport", ["cuda_ipc", "ucx"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
async def test_widths_hand_over_to_each_other(prefill: int, decode: int, transport: str, tmp_path: Path) -> None:
    await check(tmp_path, prefill=prefill, decode=decode, **GPU | {"transport": transport})


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next"])
async def test_windows_latents_and_states_are_handed_over(name: str, prefill: int, decode: int, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    options = {} if case.max_model_len is None else {"max_model_len": case.max_model_len}
    await check(tmp_path, prefill=prefill, decode=decode, model=case.build(tmp_path / name), **GPU, **options)
