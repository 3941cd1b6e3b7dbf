"""A worker of several ranks is refused before anything starts where they can't share its model."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.settings import ConfigError
from engine.cache.pages import plan_layout
from engine.config import EngineConfig
from engine.engine import read_config
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from kvtransfer.shm import ShmTransport
from services.host.plan import HostedWorker
from services.host.written import read_written
from services.pool.process import main as pooling
from services.rank.devices import fewest, held_back
from services.rank.gpu import see_one_gpu
from services.runtime.loading import load_settings
from services.up.checks import before_the_model, examine
from services.up.members import Deals
from services.up.settings import ByRole, UpSettings
from services.worker.process import build_engine, build_lender, main, see_only
from services.worker.ranks import check_ranks
from services.worker.settings import WorkerServiceSettings
from tests.models import build_tiny_model
from tests.pooling_models import build_pooling_model
from tests.unit.engine.families.catalogue import CASES


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-tp", "3"], "--tensor-parallel-size 3: ranks can't share 4 attention heads: take a number that divides"),
        (["-tp", "2", "--device", "fake"], "--tensor-parallel-size 2: a fake device computes nothing"),
        (["-tp", "2", "--model-impl", "transformers"], "--tensor-parallel-size 2: transformers computes a model whole"),
        (["-tp", "2", "--no-enable-expert-parallel", "--model", "experts"], "take --enable-expert-parallel"),
        (["-tp", "0"], "--tensor-parallel-size (BATON_TENSOR_PARALLEL_SIZE): 1 or more is needed"),
        (["-tp", "2", "--model", "/no/such"], "/no/such"),
        (
            ["-tp", "16", "--device", "cuda"],
            "--tensor-parallel-size 16: at most 8 GPUs share a layer: take 8, beside --pipeline-parallel-size for more GPUs, or",
        ),
        (["-pp", "3"], "--pipeline-parallel-size 3: a stage of 0 of 2 layers keeps no keys and values: take fewer"),
        (
            ["-pp", "8", "-tp", "16"],
            "--pipeline-parallel-size 8: more than 64 processes with --tensor-parallel-size 16: fewer",
        ),
        (["-pp", "2", "--device", "fake"], "--pipeline-parallel-size 2: a fake device computes nothing"),
        (["-pp", "2", "--model-impl", "transformers"], "--pipeline-parallel-size 2: transformers computes a model"),
        (["-pp", "2", "--model", "/no/such"], "/no/such"),
        (["-pp", "2", "--model", "states"], "2: a stage of 2 of 4 layers keeps no keys and values: take fewer"),
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


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_ranks_and_stages_see_a_gpu_each(
    device: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerServiceSettings.model_validate({"model": tmp_path, "device": device, kind: 2})
    first = int(device[5:] or 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: first + 1)
    with pytest.raises(
        ConfigError, match=f"cuda:{first} for 2 ranks or stages: this process sees {first + 1} CUDA devices"
    ):
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
    assert UpSettings(model=model, prefill=1, decode=1, pipeline_parallel_size="4").shared_out().threads == 2
    deep = UpSettings(model=model, prefill=2, decode=1, pipeline_parallel_size="prefill=2").shared_out()
    assert (deep.depths, deep.processes, deep.threads) == ([2, 2, 1], [2, 2, 1], 3)


ASKED = [
    (["-pp", "2", "--model-impl", "transformers"], "transformers computes a model whole: a model of Baton's families"),
    (["-tp", "2", "--device", "fake"], "--tensor-parallel-size 2: a fake device computes nothing"),
]


@pytest.mark.parametrize(("options", "told"), ASKED)
def test_what_no_model_could_change_is_refused_before_one_is_fetched(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker, a host's file and `up` refuse it, `up` also where workers of one role would be refused."""
    words, fetched = ["--model", "somebody/something", *options], list[object]()
    monkeypatch.setattr("services.worker.process.brought", lambda *said, **more: fetched.append(said))
    monkeypatch.setattr("services.worker.process.start_logging", lambda **said: None)
    monkeypatch.setattr("sys.argv", ["worker", *words])
    assert main("decode") == 2
    assert told in capsys.readouterr().err
    assert not fetched
    by_role = [f"decode={word}" if word == "2" else word for word in words]
    settings = load_settings(UpSettings, command="up", arguments=by_role, environment={}).shared_out()
    assert any(told in finding.said for finding in before_the_model(settings) if finding.level == "fail")


def test_what_no_model_could_change_is_said_once(tmp_path: Path) -> None:
    words = ["-pp", "2", "-tp", "2", "--model-impl", "transformers", "--data-dir", str(tmp_path), "--port", "0"]
    model = build_tiny_model(tmp_path / "llama", "llama")
    settings = load_settings(UpSettings, command="up", arguments=["--model", str(model), *words], environment={})
    told = [finding.said for finding in examine(settings.shared_out()) if finding.level == "fail"]
    assert [line.partition(": ")[2][:22] for line in told if "pipeline" in line] == ["transformers computes "]


def test_a_host_refuses_what_stages_of_ranks_do_not_have_as_it_reads_its_file(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(
        'name = "h"\n[[worker]]\nmodel = "m"\n'
        'options = {model = "some/thing", device = "cuda", tensor_parallel_size = 16, pipeline_parallel_size = 8}\n'
    )
    with pytest.raises(ConfigError, match="worker-0 of m: --pipeline-parallel-size 8: more than 64 processes"):
        read_written(file)


@pytest.mark.usefixtures("judged_here")
@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ('service = "decode"\noptions = {model = "MODEL", tensor_parallel_size = 3}', "ranks can't share 4 attention"),
        ('service = "decode"\noptions = {model = "MODEL", pipeline_parallel_size = 3}', "a stage of 0 of 2 layers"),
        ('service = "pool"\noptions = {model = "MODEL", tensor_parallel_size = 2}', "that pools is one process"),
        ('service = "pool"\noptions = {model = "MODEL"}', "it generates text: its workers are prefill, decode"),
        ('options = {model = "VECTORS"}', "it makes vectors or scores, and generates nothing: its worker is a pool"),
        ('options = {model = "OTHER"}', "FooForCausalLM is not served"),
        ('count = 2\noptions = {model = "FIELDS"}', "config.json: clip_logits"),
        ('service = "pool"\noptions = {model = "POOLED"}', "config.json: clip_logits"),
    ],
)
def test_a_host_refuses_models_that_its_workers_can_t_serve_as_it_reads_its_file(
    worker: str, told: str, tmp_path: Path
) -> None:
    folders = {
        "MODEL": build_tiny_model(tmp_path / "llama", "llama"),
        "VECTORS": build_pooling_model(tmp_path / "vectors"),
        "OTHER": build_tiny_model(tmp_path / "other", "llama"),
    }
    (folders["OTHER"] / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    for name, of in (("FIELDS", "MODEL"), ("POOLED", "VECTORS")):
        folders[name] = with_a_field(folders[of], tmp_path / name)
    file = tmp_path / "host.toml"
    for name, folder in folders.items():
        worker = worker.replace(f'"{name}"', f'"{folder}"')
    file.write_text(f'name = "h"\n[[worker]]\nmodel = "m"\n{worker}\n')
    with pytest.raises(ConfigError, match=told) as refused:
        read_written(file)
    assert "-0" in str(refused.value)


@pytest.mark.long
def test_up_refuses_a_model_that_a_role_s_ranks_can_t_share_before_anything_starts(tmp_path: Path) -> None:
    models = [build_tiny_model(tmp_path / name, "llama") for name in ("a", "b")]
    words = [word for model in models for word in ("--model", str(model))]
    words += ["--prefill", "1", "-tp", "prefill=2,decode=3", "--data-dir", str(tmp_path), "--port", "0"]
    settings = load_settings(UpSettings, command="up", arguments=words, environment={}).shared_out()
    told = [finding.said for finding in examine(settings) if finding.level == "fail"]
    assert [line.partition(": ")[0] for line in told] == [f"--model {model}" for model in models]
    assert all("--tensor-parallel-size 3: ranks can't share 4 attention heads" in line for line in told)


def with_a_field(model: Path, folder: Path) -> Path:
    """A copy of a model with a field that no family knows."""
    shutil.copytree(model, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"clip_logits": 3}))
    return folder


@pytest.mark.usefixtures("judged_here")
@pytest.mark.parametrize("options", [("--keep-alive", "5m"), ("--device", "cuda")], ids=["loaded later", "on GPUs"])
def test_up_refuses_fields_that_no_worker_knows_where_no_nursery_says_them(
    options: tuple[str, str], tmp_path: Path
) -> None:
    models = [build_tiny_model(tmp_path / "a", "llama"), build_pooling_model(tmp_path / "b")]
    folders = [with_a_field(model, tmp_path / f"{model.name}-field") for model in models]
    words = [word for folder in (*folders, *models) for word in ("--model", str(folder))]
    words += [*options, "--data-dir", str(tmp_path), "--port", "0"]
    settings = load_settings(UpSettings, command="up", arguments=words, environment={}).shared_out()
    told = [finding.said for finding in examine(settings) if finding.check == "model" and finding.level == "fail"]
    assert [line.partition(": config.json: clip_logits")[0] for line in told] == [f"--model {one}" for one in folders]


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_a_worker_that_pools_is_one_process(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.pool.process.start_logging", lambda **said: None)
    monkeypatch.setattr("sys.argv", ["pool", "--model", "somebody/something", flag, "2"])
    assert pooling() == 2
    assert f"{flag} 2: a worker that pools is one process: take 1" in capsys.readouterr().err


def test_a_worker_of_stages_borrows_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a twin are the whole model's: settings of the engine don't say how many stages there are."""
    model = build_tiny_model(tmp_path / "llama", "llama")
    lender = build_lender("decode", {"BATON_MODEL": str(model)})
    lent = list[object]()
    monkeypatch.setattr("services.worker.process.Engine", lambda *said, lender, **more: lent.append(lender))
    settings = WorkerServiceSettings(model=model, pipeline_parallel_size=2).sized()
    build_engine(settings, ShmTransport(), lender)
    build_engine(settings, ShmTransport(), lender, Ranks(followers=Followed()))
    assert lent == [lender, None]


class Followed:
    """Followers of which nothing is asked."""

    def send(self, *frames: bytes) -> None: ...

    def wait(self) -> None: ...

    def problem(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("text", "widths"),
    [("2", (2, 2)), ("prefill=2,decode=1", (2, 1)), ("decode=4", (1, 4)), ("decode=4,prefill=2", (2, 4))],
)
def test_up_takes_ranks_and_stages_by_role(text: str, widths: tuple[int, int]) -> None:
    assert ByRole.parse(text) == widths


@pytest.mark.parametrize(
    "text", ["0", "65", "two", "prefill=0", "prefill", "planner=2", "prefill=2,prefill=3", "prefill=2,"]
)
@pytest.mark.parametrize(
    ("flag", "what"), [("--tensor-parallel-size", "ranks"), ("--pipeline-parallel-size", "stages")]
)
def test_up_names_the_form_of_ranks_and_stages(flag: str, what: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} .*(prefill=N,decode=M|1 to 64 {what} are needed)"):
        load_settings(UpSettings, command="up", arguments=[flag, text], environment={})


def test_a_pool_leaves_what_the_fullest_card_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees its own card alone: here a rank is a thread."""
    memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(3))
    groups = [SharedMemoryGroup(memory, rank=rank, size=3) for rank in range(3)]
    free = {"cuda:0": 50 << 30, "cuda:1": 47 << 30, "cuda:2": 60 << 30}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device], 80 << 30))
    with ThreadPoolExecutor(3) as ranks:
        assert [*ranks.map(held_back, groups, free)] == [3 << 30, 0, 13 << 30]


@pytest.mark.parametrize(
    ("devices", "dealt", "taken"),
    [
        ("cuda", ["cuda:0", "cuda:2", "cuda:4"], [0, 1, 2, 3, 4]),
        ("cuda:3,cuda:0,cuda:5", ["cuda:3", "cuda:0", "cuda:5"], [3, 4, 0, 1, 5]),
    ],
)
def test_up_deals_out_a_gpu_for_each_stage(devices: str, dealt: list[str], taken: list[int]) -> None:
    words = ["--device", devices, "-pp", "prefill=2", "--prefill", "2", "--decode", "1", "--model", "m"]
    settings = load_settings(UpSettings, command="up", arguments=words, environment={}).shared_out()
    deals = Deals(settings)
    found = [deals.next() for _ in settings.processes]
    assert [each["BATON_DEVICE"] for each in found] == dealt
    assert [each["BATON_PIPELINE_PARALLEL_SIZE"] for each in found] == ["2", "2", "1"]
    hosted = [HostedWorker(name="w", id="w", service="worker", variables=each, log_file="/none") for each in found]
    assert [card for each in hosted for card in sorted(each.cards)] == [f"cuda:{index}" for index in taken]


def test_a_pool_has_the_blocks_of_the_stage_with_the_least_room() -> None:
    memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(3))
    groups = [SharedMemoryGroup(memory, rank=rank, size=3) for rank in range(3)]
    with ThreadPoolExecutor(3) as stages:
        assert [*stages.map(fewest, groups, (900, 70_000, 800))] == [800] * 3


def test_held_back_bytes_are_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (50 << 30, 80 << 30))
    config = EngineConfig(model=build_tiny_model(tmp_path / "llama", "llama"), device="cuda:0")
    spec = read_config(config)
    whole, less = (plan_layout(spec, config, "float32", held_back=count) for count in (0, 3 << 30))
    assert whole.num_blocks - less.num_blocks == (3 << 30) // whole.block_bytes
