"""A worker of several ranks is refused before anything starts where they can't share its model."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.settings import ConfigError
from engine.cache.pages import plan_layout
from engine.config import EngineConfig
from engine.engine import read_config
from engine.parallel.shared_memory import SharedMemoryGroup
from services.rank.devices import held_back
from services.rank.gpu import see_one_gpu
from services.runtime.loading import load_settings
from services.up.settings import UpSettings, Widths
from services.worker.process import build_lender, see_only
from services.worker.ranks import check_ranks
from services.worker.settings import WorkerServiceSettings
from tests.models import build_tiny_model
from tests.unit.engine.families.catalogue import CASES


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-tp", "3"], "--tensor-parallel-size 3: ranks can't share 4 attention heads: take a number that divides"),
        (["-tp", "2", "--device", "fake"], "--tensor-parallel-size 2: a fake device computes nothing"),
        (["-tp", "2", "--kv-host-mb", "auto:shared"], "--kv-host-mb takes no :shared with them, or take 1"),
        (["-tp", "2", "--model-impl", "transformers"], "--tensor-parallel-size 2: transformers computes a model whole"),
        (["-tp", "2", "--no-enable-expert-parallel", "--model", "experts"], "take --enable-expert-parallel"),
        (["-tp", "0"], "--tensor-parallel-size (BATON_TENSOR_PARALLEL_SIZE): 1 or more is needed"),
        (["-tp", "2", "--model", "/no/such"], "/no/such"),
        (["-pp", "3"], "--pipeline-parallel-size 3: a stage of 0 of 2 layers keeps no keys and values: take fewer"),
        (["-pp", "2", "-tp", "2"], "--pipeline-parallel-size 2: --tensor-parallel-size 2 beside it: ranks don't share"),
        (["-pp", "2", "--device", "fake"], "--pipeline-parallel-size 2: a fake device computes nothing"),
        (["-pp", "2", "--device", "cuda"], "stages compute on CPUs, not on cuda: --device cpu"),
        (["-pp", "2", "--kv-host-mb", "auto:shared"], "stages have host memory of their own: --kv-host-mb takes no"),
        (["-pp", "2", "--model-impl", "transformers"], "--pipeline-parallel-size 2: transformers computes a model"),
        (["-pp", "2", "--speculative-config", '{"method": "mtp"}'], "draft heads and models aren't cut into stages"),
        (["-pp", "2", "--model", "/no/such"], "/no/such"),
        (["-pp", "2", "--model", "states"], "layers with recurrent states aren't cut into stages yet: take 1"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_flag_and_a_remedy(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "states" in options:
        next(case for case in CASES if case.name == "qwen3_next").build(tmp_path / "states")
    if "experts" in options:
        build_tiny_model(tmp_path / "experts", "qwen3_moe")
    words = ["--model", str(build_tiny_model(tmp_path / "llama", "llama")), *options]
    with pytest.raises((ConfigError, ValueError)) as raised:
        check_ranks(load_settings(WorkerServiceSettings, command="decode", arguments=words, environment={}).sized())
    assert told in str(raised.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_ranks_see_a_gpu_each(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerServiceSettings(model=tmp_path, device=device, tensor_parallel_size=2)
    first = int(device[5:] or 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: first + 1)
    with pytest.raises(ConfigError, match=f"cuda:{first} for 2 ranks: this process sees {first + 1} CUDA devices"):
        see_only(settings)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert see_only(settings).device == "cuda:0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6,7"[2 * first :][:3]
    see_one_gpu(1, count=2)  # as its further rank
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "467"[first + 1]


def test_ranks_share_the_cores_and_are_lent_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    for module in ("services.worker.settings", "services.up.settings"):
        monkeypatch.setattr(f"{module}.physical_cores", lambda: 16)
    alone = WorkerServiceSettings(model=model, tensor_parallel_size=4).sized()
    assert (alone.engine().num_threads, alone.engine().tensor_parallel_size) == (4, 4)
    assert UpSettings(model=model, prefill=1, decode=1, tensor_parallel_size="4").shared_out().threads == 2
    by_role = UpSettings(model=model, prefill=1, decode=2, tensor_parallel_size="prefill=2,decode=1").shared_out()
    assert (by_role.widths, by_role.threads) == ([2, 1, 1], 4)
    assert build_lender("decode", {"BATON_MODEL": str(model), "BATON_TENSOR_PARALLEL_SIZE": "2"}) is None
    assert build_lender("decode", {"BATON_MODEL": str(model), "BATON_PIPELINE_PARALLEL_SIZE": "2"}) is None
    assert WorkerServiceSettings(model=model, pipeline_parallel_size=4).sized().engine().num_threads == 4
    assert UpSettings(model=model, prefill=1, decode=1, pipeline_parallel_size=4).shared_out().threads == 2


@pytest.mark.parametrize(
    ("text", "widths"),
    [("2", (2, 2)), ("prefill=2,decode=1", (2, 1)), ("decode=4", (1, 4)), ("decode=4,prefill=2", (2, 4))],
)
def test_up_takes_ranks_by_role(text: str, widths: tuple[int, int]) -> None:
    assert Widths.parse(text) == widths


@pytest.mark.parametrize(
    "text", ["0", "65", "two", "prefill=0", "prefill", "planner=2", "prefill=2,prefill=3", "prefill=2,"]
)
def test_up_names_the_form_of_ranks(text: str) -> None:
    words = ["--tensor-parallel-size", text]
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size .*(prefill=N,decode=M|1 to 64 ranks are needed)"):
        load_settings(UpSettings, command="up", arguments=words, environment={})


def test_a_pool_leaves_what_the_fullest_card_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees its own card alone: here a rank is a thread."""
    memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(3))
    groups = [SharedMemoryGroup(memory, rank=rank, size=3) for rank in range(3)]
    free = {"cuda:0": 50 << 30, "cuda:1": 47 << 30, "cuda:2": 60 << 30}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device], 80 << 30))
    with ThreadPoolExecutor(3) as ranks:
        assert [*ranks.map(held_back, groups, free)] == [3 << 30, 0, 13 << 30]


def test_held_back_bytes_are_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (50 << 30, 80 << 30))
    config = EngineConfig(model=build_tiny_model(tmp_path / "llama", "llama"), device="cuda:0")
    spec = read_config(config)
    whole, less = (plan_layout(spec, config, "float32", held_back=count) for count in (0, 3 << 30))
    assert whole.num_blocks - less.num_blocks == (3 << 30) // whole.block_bytes
